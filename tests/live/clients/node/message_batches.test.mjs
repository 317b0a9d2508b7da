// @anthropic-ai/sdk: batches of messages.

import assert from "node:assert/strict";
import test from "node:test";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.env.BASE_URL.replace(/\/v1$/, ""), apiKey: "none", maxRetries: 0 });
const params = { model: "tiny-gpt-oss", max_tokens: 100, temperature: 0, messages: [{ role: "user", content: "Say hello." }] };

async function over(batches, id) {
  for (;;) {
    const batch = await batches.retrieve(id);
    if (batch.processing_status === "ended") return batch;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

for (const [name, batches] of [["stable", client.messages.batches], ["beta", client.beta.messages.batches]]) {
  test(`a batch (${name}): create, poll, read the results, delete`, async () => {
    const requests = [
      { custom_id: "my-first-request", params },
      { custom_id: "my-second-request", params },
      { custom_id: "wrong", params: { ...params, model: "unknown" } },
    ];
    const made = await batches.create({ requests });
    assert.equal(made.processing_status, "in_progress");
    const batch = await over(batches, made.id);
    assert.deepEqual(batch.request_counts, { processing: 0, succeeded: 2, errored: 1, canceled: 0, expired: 0 });
    const texts = {};
    for await (const entry of await batches.results(made.id)) {
      if (entry.result.type === "succeeded") texts[entry.custom_id] = entry.result.message.content.at(-1).text;
      else assert.equal(entry.result.error.error.type, "not_found_error");
    }
    const hello = "Hello! How can I help you today?";
    assert.deepEqual(texts, { "my-first-request": hello, "my-second-request": hello });
    const listed = [];
    for await (const each of batches.list({ limit: 1 })) listed.push(each.id);
    assert.ok(listed.includes(made.id));
    assert.equal((await batches.delete(made.id)).type, "message_batch_deleted");
    await assert.rejects(batches.retrieve(made.id), Anthropic.NotFoundError);
  });
}

test("a custom_id that stands twice is refused", async () => {
  const requests = [{ custom_id: "a", params }, { custom_id: "a", params }];
  await assert.rejects(client.messages.batches.create({ requests }), /requests\.1\.custom_id/);
});
