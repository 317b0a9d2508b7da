// openai-node: batches of requests in files, and files in parts.

import assert from "node:assert/strict";
import { createReadStream } from "node:fs";
import { mkdtemp, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import path from "node:path";
import test from "node:test";
import OpenAI, { toFile } from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const model = "tiny-gpt-oss";
const endpoint = "/v1/chat/completions";
const ended = ["completed", "failed", "expired", "cancelled"];

function requests(count) {
  const body = { model, temperature: 0, messages: [{ role: "user", content: "Say hello." }] };
  const lines = Array.from({ length: count }, (_, number) => ({ custom_id: `request-${number}`, method: "POST", url: endpoint, body }));
  return lines.map((line) => JSON.stringify(line)).join("\n");
}

async function over(id) {
  for (;;) {
    const batch = await client.batches.retrieve(id);
    if (ended.includes(batch.status)) return batch;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

async function results(file) {
  const text = await (await client.files.content(file)).text();
  return text.trim().split("\n").map((line) => JSON.parse(line));
}

test("a batch: upload, create, poll, read the results", async () => {
  const place = path.join(await mkdtemp(path.join(tmpdir(), "batch-")), "batchinput.jsonl");
  await writeFile(place, requests(3));
  const file = await client.files.create({ file: createReadStream(place), purpose: "batch" });
  const metadata = { description: "nightly eval job" };
  const made = await client.batches.create({ input_file_id: file.id, endpoint, completion_window: "24h", metadata });
  assert.equal(made.status, "validating");
  const batch = await over(made.id);
  assert.equal(batch.status, "completed", JSON.stringify(batch.errors));
  assert.deepEqual(batch.request_counts, { total: 3, completed: 3, failed: 0 });
  assert.deepEqual(batch.metadata, metadata);
  assert.equal(batch.error_file_id, null);
  const lines = await results(batch.output_file_id);
  assert.deepEqual(lines.map((line) => line.custom_id).sort(), ["request-0", "request-1", "request-2"]);
  for (const line of lines) {
    assert.equal(line.response.status_code, 200);
    assert.equal(line.response.body.object, "chat.completion");
    assert.equal(line.error, null);
  }
  const listed = [];
  for await (const each of client.batches.list({ limit: 1 })) listed.push(each.id);
  assert.ok(listed.includes(batch.id));
  await assert.rejects(client.batches.cancel(batch.id), OpenAI.ConflictError);
});

test("a file in parts, whose lines are no requests", async () => {
  const halves = [Buffer.from(requests(2)), Buffer.from("\n{oops")];
  const upload = await client.uploads.create({
    bytes: halves[0].length + halves[1].length,
    filename: "lines.jsonl",
    mime_type: "application/jsonl",
    purpose: "batch",
  });
  const parts = [];
  for (const half of halves) parts.push(await client.uploads.parts.create(upload.id, { data: await toFile(half, "part") }));
  const { file } = await client.uploads.complete(upload.id, { part_ids: parts.map((part) => part.id) });
  const made = await client.batches.create({ input_file_id: file.id, endpoint, completion_window: "24h" });
  const batch = await over(made.id);
  assert.equal(batch.status, "failed");
  const problem = { code: "invalid_json_line", message: "This line is not parseable as valid JSON.", param: null, line: 3 };
  assert.deepEqual(batch.errors, { data: [problem], object: "list" });
});
