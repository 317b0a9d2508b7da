// openai-node: OpenAI's own client in JavaScript.

import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";
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
