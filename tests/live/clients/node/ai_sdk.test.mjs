// The AI SDK with its OpenAI provider, which sends the ids of items that the server has stored.

import assert from "node:assert/strict";
import test from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import OpenAI from "openai";
import { APICallError, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { question, waterworks } from "./waterworks.mjs";

const openai = createOpenAI({ baseURL: process.env.BASE_URL, apiKey: "none" });
const model = openai.responses("tiny-gpt-oss");
const temperature = 0;
const hello = "Hello! How can I help you today?";
const person = z.object({ name: z.enum(["Ada", "Grace"]), age: z.number().int().min(0).max(150) });

const tools = {
  get_weather: tool({
    description: "Get the weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => ({ temperature: city === "Paris" ? 18 : 0, unit: "C" }),
  }),
};

test("text", async () => {
  const { text } = await generateText({ model, temperature, prompt: "Say hello." });
  assert.equal(text, hello);
});

test("streamed text", async () => {
  const { textStream } = streamText({ model, temperature, prompt: "Say hello." });
  const pieces = await Array.fromAsync(textStream);
  assert.equal(pieces.join(""), hello);
});

for (const store of [true, false]) {
  test(`a tool round trip, store: ${store}`, async () => {
    const providerOptions = { openai: { store } };
    const prompt = "What is the weather in Paris?";
    const stopWhen = stepCountIs(3);
    const { text, steps } = await generateText({ model, temperature, tools, prompt, stopWhen, providerOptions });
    assert.equal(text, "It is 18 °C in Paris right now.");
    assert.deepEqual(steps[0].toolCalls[0].input, { city: "Paris" });
  });
}

test("a streamed tool round trip", async () => {
  const prompt = "What is the weather in Paris?";
  const { textStream } = streamText({ model, temperature, tools, prompt, stopWhen: stepCountIs(3) });
  const pieces = await Array.fromAsync(textStream);
  assert.equal(pieces.join(""), "It is 18 °C in Paris right now.");
});

const calculator = { serverLabel: "calculator", serverUrl: process.env.DOCUMENTS_URL, requireApproval: "never" };
const hosted = { code_interpreter: openai.tools.codeInterpreter({}), mcp: openai.tools.mcp(calculator) };
const questions = {
  "Set x to 20 in Python, then double it.": ["Twice 20 is 40.", ["code_interpreter", "code_interpreter"]],
  "Add 2 and 3 with the calculator server.": ["2 plus 3 is 5.", ["mcp.add"]],
};

for (const [prompt, [answer, calls]] of Object.entries(questions)) {
  test(`tools that the server runs: ${prompt}`, async () => {
    const { text, toolCalls, toolResults } = await generateText({ model, temperature, tools: hosted, prompt });
    assert.equal(text, answer);
    assert.deepEqual(toolCalls.map((call) => call.toolName), calls);
    assert.equal(toolResults.length, calls.length);
  });

  test(`the same as a stream: ${prompt}`, async () => {
    const result = streamText({ model, temperature, tools: hosted, prompt });
    assert.equal(await result.text, answer);
    assert.deepEqual((await result.toolCalls).map((call) => call.toolName), calls);
    assert.equal((await result.toolResults).length, calls.length);
  });
}

test("what the server did, sent back", async () => {
  const messages = [];
  for (const [content, [answer]] of Object.entries(questions)) {
    messages.push({ role: "user", content });
    const { text, response } = await generateText({ model, temperature, tools: hosted, messages });
    assert.equal(text, answer);
    messages.push(...response.messages);
  }
});

test("reasoning, as a summary", async () => {
  const providerOptions = { openai: { reasoningSummary: "auto", forceReasoning: true } };
  const { reasoningText } = await generateText({ model, prompt: "Say hello.", providerOptions });
  assert.equal(reasoningText, "The user wants a greeting.");
});

test("structured output", async () => {
  const output = Output.object({ schema: person });
  const result = await generateText({ model, temperature, output, prompt: "Say hello." });
  person.parse(result.output);
});

test("an unknown model", async () => {
  const asked = generateText({ model: openai.responses("gpt-9"), prompt: "Hi", maxRetries: 0 });
  await assert.rejects(asked, (error) => APICallError.isInstance(error) && error.statusCode === 404);
});

test("thoughts that the client carries, without a store", async () => {
  const providerOptions = { openai: { store: false, include: ["reasoning.encrypted_content"] } };
  const first = await generateText({ model, temperature, prompt: "Say hello.", providerOptions });
  assert.equal(first.text, hello);
  const sealed = first.content.filter((part) => part.type === "reasoning");
  assert.match(sealed[0].providerMetadata.openai.reasoningEncryptedContent, /^pst1\./);
  const user = (content) => ({ role: "user", content });
  const messages = [user("Say hello."), ...first.response.messages, user("Answer directly.")];
  const second = await generateText({ model, temperature, messages, providerOptions });
  assert.equal(second.text, "This is a direct answer.");
});

test("a search in files, and what it found sent back", async () => {
  const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none" });
  const store = await waterworks(client);
  const tools = { file_search: openai.tools.fileSearch({ vectorStoreIds: [store.id] }) };
  const toolChoice = { type: "tool", toolName: "file_search" };
  const providerOptions = { openai: { include: ["file_search_call.results"] } };
  const messages = [{ role: "user", content: question }];
  for (const turn of ["first", "second"]) {
    const { toolResults, response } = await generateText({ model, temperature, tools, toolChoice, messages, providerOptions });
    const names = toolResults[0].output.results.map((result) => result.filename);
    assert.deepEqual(names.sort(), ["gate.txt", "pipe.txt"], turn);
    messages.push(...response.messages, { role: "user", content: question });
  }
  await client.vectorStores.delete(store.id);
});

const program = `found = await asyncio.gather(*(look(number=number) for number in range(3)))
print(sum(found), await look(number=sum(found)))`;

for (const store of [true, false]) {
  test(`the calls of a program, store: ${store}`, async () => {
    const own = createOpenAI({ baseURL: `${process.env.PROGRAMMING_URL}/v1`, apiKey: "none" });
    const tools = {
      program: own.tools.programmaticToolCalling(),
      look: tool({
        description: "Look a number up.",
        inputSchema: z.object({ number: z.number().int() }),
        execute: async ({ number }) => 7 * number,
      }),
    };
    const prompt = `run ${JSON.stringify(program)}\nsay {result}`;
    const asked = {
      model: own.responses("agent"), maxRetries: 0, prompt, tools, experimental_toolCallers: { look: ["program"] },
      providerOptions: { openai: { store } }, stopWhen: stepCountIs(5),
    };
    assert.equal((await generateText(asked)).text.trim(), "21 147");
    assert.equal((await streamText(asked).text).trim(), "21 147");
  });
}
