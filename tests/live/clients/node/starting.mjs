// openai-node while a model starts: it goes on only once the client has got two signs of life.

import assert from "node:assert/strict";
import { writeFileSync } from "node:fs";
import test from "node:test";
import OpenAI from "openai";

const { BASE_URL, MODEL, FILE, TEXT } = process.env;

async function watched(...request) {
  const answer = await fetch(...request);
  let pieces = 0;
  const watching = new TransformStream({
    transform(piece, output) {
      pieces += 1;
      if (pieces === 2) writeFileSync(FILE, "");
      output.enqueue(piece);
    },
  });
  return new Response(answer.body.pipeThrough(watching), answer);
}

test("a stream waits for a model that starts", async () => {
  const client = new OpenAI({ baseURL: BASE_URL, apiKey: "none", maxRetries: 0, fetch: watched });
  const response = await client.responses.stream({ model: MODEL, input: "Hi" }).finalResponse();
  assert.equal(response.output_text, TEXT);
});
