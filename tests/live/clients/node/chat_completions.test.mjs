// Chat Completions: OpenAI's own client in JavaScript, and the AI SDK.

import assert from "node:assert/strict";
import test from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, isStepCount, Output, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const model = "tiny-gpt-oss";
const temperature = 0;
const hello = "Hello! How can I help you today?";
const weather = "It is 18 °C in Paris right now.";
const result = '{"temperature":18,"unit":"C"}';
const person = z.object({ name: z.enum(["Ada", "Grace"]), age: z.number().int().min(0).max(150) });
const said = (content) => [{ role: "user", content }];

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Get the weather of a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

test("openai: text", async () => {
  const completion = await client.chat.completions.create({ model, temperature, messages: said("Say hello.") });
  assert.equal(completion.choices[0].message.content, hello);
});

test("openai: streamed text, by the helper", async () => {
  const stream = client.chat.completions.stream({ model, temperature, messages: said("Say hello.") });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const completion = await stream.finalChatCompletion();
  assert.equal(completion.choices[0].message.content, hello);
  assert.equal(text, hello);
});

test("openai: a tool round trip, by the helper", async () => {
  const runner = client.chat.completions.runTools({
    model,
    temperature,
    stream: true,
    messages: said("What is the weather in Paris?"),
    tools: [{ ...tools[0], function: { ...tools[0].function, function: () => result, parse: JSON.parse } }],
  });
  assert.equal(await runner.finalContent(), weather);
});

test("openai: structured output", async () => {
  const completion = await client.chat.completions.parse({
    model,
    temperature,
    messages: said("Say hello."),
    response_format: zodResponseFormat(person, "person"),
  });
  assert.ok(person.parse(completion.choices[0].message.parsed));
});

test("openai: an error", async () => {
  await assert.rejects(client.chat.completions.create({ model: "gpt-9", messages: said("Hi") }), OpenAI.NotFoundError);
});

const chat = createOpenAI({ baseURL: process.env.BASE_URL, apiKey: "none" }).chat(model);
const options = { model: chat, temperature, maxRetries: 0 };

test("AI SDK: text and stream", async () => {
  assert.equal((await generateText({ ...options, prompt: "Say hello." })).text, hello);
  assert.equal(await streamText({ ...options, prompt: "Say hello." }).text, hello);
});

test("AI SDK: a tool round trip", async () => {
  const getWeather = tool({
    description: "Get the weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async () => JSON.parse(result),
  });
  const answered = await generateText({
    ...options,
    prompt: "What is the weather in Paris?",
    tools: { get_weather: getWeather },
    stopWhen: isStepCount(3),
  });
  assert.equal(answered.text, weather);
});

test("AI SDK: structured output", async () => {
  const answered = await generateText({
    ...options,
    prompt: "Say hello.",
    output: Output.object({ schema: person }),
  });
  assert.ok(person.parse(answered.output));
});

test("AI SDK: an error", async () => {
  const wrong = createOpenAI({ baseURL: process.env.BASE_URL, apiKey: "none" }).chat("gpt-9");
  await assert.rejects(generateText({ model: wrong, maxRetries: 0, prompt: "Hi" }), { statusCode: 404 });
});
