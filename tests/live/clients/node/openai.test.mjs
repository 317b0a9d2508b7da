// openai-node: OpenAI's own client in JavaScript.

import assert from "node:assert/strict";
import test from "node:test";
import OpenAI, { toFile } from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const model = "tiny-gpt-oss";
const temperature = 0;
const hello = "Hello! How can I help you today?";
const person = z.object({ name: z.enum(["Ada", "Grace"]), age: z.number().int().min(0).max(150) });

const tools = [
  {
    type: "function",
    name: "get_weather",
    description: "Get the weather of a city.",
    parameters: {
      type: "object",
      properties: { city: { type: "string" } },
      required: ["city"],
      additionalProperties: false,
    },
    strict: true,
  },
];

test("text", async () => {
  const response = await client.responses.create({ model, temperature, input: "Say hello." });
  assert.equal(response.output_text, hello);
});

test("streamed text, by the helper", async () => {
  const stream = client.responses.stream({ model, temperature, input: "Say hello." });
  let text = "";
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  const response = await stream.finalResponse();
  assert.equal(response.output_text, hello);
  assert.equal(text, hello);
});

test("a tool round trip, by previous_response_id", async () => {
  const called = await client.responses.create({ model, temperature, tools, input: "What is the weather in Paris?" });
  const call = called.output.at(-1);
  assert.deepEqual(JSON.parse(call.arguments), { city: "Paris" });
  const answered = await client.responses.create({
    model,
    temperature,
    tools,
    previous_response_id: called.id,
    input: [{ type: "function_call_output", call_id: call.call_id, output: '{"temperature":18,"unit":"C"}' }],
  });
  assert.equal(answered.output_text, "It is 18 °C in Paris right now.");
});

test("structured output", async () => {
  const format = zodTextFormat(person, "person");
  const response = await client.responses.parse({ model, temperature, input: "Say hello.", text: { format } });
  person.parse(response.output_parsed);
});

test("an unknown model", async () => {
  await assert.rejects(client.responses.create({ model: "gpt-9", input: "Hi" }), OpenAI.NotFoundError);
});

test("files: upload, list, content, a response that reads one, delete", async () => {
  const file = await toFile(Buffer.from("Sales rose."), "report.txt", { type: "text/plain" });
  const made = await client.files.create({ file, purpose: "user_data" });
  assert.equal(made.filename, "report.txt");
  assert.equal((await client.files.waitForProcessing(made.id)).status, "processed");
  const listed = [];
  for await (const each of client.files.list({ limit: 2, purpose: "user_data" })) listed.push(each.id);
  assert.ok(listed.includes(made.id));
  assert.equal(await (await client.files.content(made.id)).text(), "Sales rose.");
  const content = [
    { type: "input_file", file_id: made.id },
    { type: "input_text", text: "Say hello." },
  ];
  const response = await client.responses.create({ model, max_output_tokens: 16, input: [{ role: "user", content }] });
  assert.ok(response.usage.input_tokens > 20);
  assert.equal((await client.files.delete(made.id)).deleted, true);
  await assert.rejects(client.files.retrieve(made.id), OpenAI.NotFoundError);
});
