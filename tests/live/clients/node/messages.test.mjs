// The Messages API: Anthropic's own client in JavaScript, and the AI SDK.

import assert from "node:assert/strict";
import test from "node:test";
import { createAnthropic, forwardAnthropicContainerIdFromLastStep } from "@ai-sdk/anthropic";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";

const model = "tiny-gpt-oss";
const max_tokens = 500;
const hello = "Hello! How can I help you today?";
const thought = "The user wants a greeting.";
const weather = "It is 18 °C in Paris right now.";
const result = '{"temperature":18,"unit":"C"}';
const person = z.object({ name: z.enum(["Ada", "Grace"]), age: z.number().int().min(0).max(150) });
const said = (content) => [{ role: "user", content }];

const baseURL = process.env.BASE_URL.replace(/\/v1$/, "");
const client = new Anthropic({ baseURL, apiKey: "none", maxRetries: 0 });
const getWeather = betaZodTool({
  name: "get_weather",
  description: "Get the weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  run: () => result,
});

test("anthropic: text", async () => {
  const message = await client.messages.create({ model, max_tokens, messages: said("Say hello.") });
  assert.deepEqual(message.content.map((block) => block.type), ["thinking", "text"]);
  assert.equal(message.content[1].text, hello);
});

test("anthropic: streamed text, by the helper", async () => {
  const stream = client.messages.stream({ model, max_tokens, messages: said("Say hello.") });
  let text = "";
  stream.on("text", (delta) => (text += delta));
  const message = await stream.finalMessage();
  assert.deepEqual([text, message.stop_reason], [hello, "end_turn"]);
  const { usage } = await client.messages.create({ model, max_tokens, messages: said("Say hello.") });
  const read = ({ input_tokens, cache_read_input_tokens }) => input_tokens + cache_read_input_tokens;
  assert.deepEqual([read(message.usage), message.usage.output_tokens], [read(usage), usage.output_tokens]);
});

for (const stream of [false, true]) {
  test(`anthropic: a tool round trip, by the helper, stream: ${stream}`, async () => {
    const messages = said("What is the weather in Paris?");
    const runner = client.beta.messages.toolRunner({ model, max_tokens, messages, tools: [getWeather], stream });
    const message = await runner.runUntilDone();
    assert.equal(message.content.at(-1).text, weather);
  });
}

const programming = process.env.PROGRAMMING_URL;
const program = `import asyncio
found = await asyncio.gather(*(look(number=number) for number in range(3)))
print(sum(found), await look(number=sum(found)))`;
const dictated = said(`run ${JSON.stringify(program)}\nsay {result}`);

for (const stream of [false, true]) {
  test(`anthropic: the calls of a program, by the helper, stream: ${stream}`, async () => {
    const look = betaZodTool({
      name: "look",
      description: "Look a number up.",
      inputSchema: z.object({ number: z.number().int() }),
      run: ({ number }) => `${7 * number}`,
      allowed_callers: ["code_execution_20260120"],
    });
    const tools = [{ type: "code_execution_20260120", name: "code_execution" }, look];
    const own = new Anthropic({ baseURL: programming, apiKey: "none", maxRetries: 0 });
    const runner = own.beta.messages.toolRunner({ model: "agent", max_tokens, messages: dictated, tools, stream });
    const message = await runner.runUntilDone();
    assert.equal(message.content.at(-1).text.trim(), "21 147");
  });
}

test("anthropic: structured output", async () => {
  const output_config = { format: zodOutputFormat(person) };
  const message = await client.messages.parse({ model, max_tokens, messages: said("Say hello."), output_config });
  person.parse(message.parsed_output);
});

test("anthropic: an error", async () => {
  const asked = client.messages.create({ model: "gpt-9", max_tokens, messages: said("Hi") });
  await assert.rejects(asked, (error) => error instanceof Anthropic.NotFoundError && error.type === "not_found_error");
});

const anthropic = createAnthropic({ baseURL: process.env.BASE_URL, apiKey: "none" });
const options = { model: anthropic(model), maxOutputTokens: max_tokens, maxRetries: 0 };

test("AI SDK: text, thoughts and stream", async () => {
  const answered = await generateText({ ...options, prompt: "Say hello." });
  assert.deepEqual([answered.text, answered.reasoningText], [hello, thought]);
  const streamed = streamText({ ...options, prompt: "Say hello." });
  assert.equal(await streamed.text, hello);
  assert.equal((await streamed.usage).totalTokens, answered.usage.totalTokens);
});

const tools = {
  get_weather: tool({
    description: "Get the weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async () => JSON.parse(result),
  }),
};

test("AI SDK: a tool round trip", async () => {
  const prompt = "What is the weather in Paris?";
  const answered = await generateText({ ...options, prompt, tools, stopWhen: isStepCount(3) });
  assert.equal(answered.text, weather);
  assert.equal(await streamText({ ...options, prompt, tools, stopWhen: isStepCount(3) }).text, weather);
});

test("AI SDK: the calls of a program", async () => {
  const own = createAnthropic({ baseURL: `${programming}/v1`, apiKey: "none" });
  const tools = {
    code_execution: own.tools.codeExecution_20260120(),
    look: tool({
      description: "Look a number up.",
      inputSchema: z.object({ number: z.number().int() }),
      execute: async ({ number }) => 7 * number,
      providerOptions: { anthropic: { allowedCallers: ["code_execution_20260120"] } },
    }),
  };
  const asked = { model: own("agent"), maxRetries: 0, messages: dictated, tools };
  const looped = { prepareStep: forwardAnthropicContainerIdFromLastStep, stopWhen: isStepCount(5) };
  assert.equal((await generateText({ ...asked, ...looped })).text.trim(), "21 147");
  assert.equal((await streamText({ ...asked, ...looped }).text).trim(), "21 147");
});

test("AI SDK: structured output", async () => {
  const output = Output.object({ schema: person });
  const answered = await generateText({ ...options, prompt: "Say hello.", output });
  person.parse(answered.output);
});

test("AI SDK: an error", async () => {
  const asked = generateText({ model: anthropic("gpt-9"), maxRetries: 0, prompt: "Hi" });
  await assert.rejects(asked, { statusCode: 404 });
});
