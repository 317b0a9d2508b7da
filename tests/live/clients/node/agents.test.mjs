// OpenAI's Agents SDK for JavaScript, which checks each finished response of a stream against a schema of its own.

import assert from "node:assert/strict";
import test from "node:test";
import { Agent, MemorySession, OpenAIConversationsSession, OpenAIProvider, Runner, codeInterpreterTool, fileSearchTool, hostedMcpTool, programmaticToolCallingTool, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import { question, waterworks } from "./waterworks.mjs";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none" });
const modelProvider = new OpenAIProvider({ openAIClient: client, useResponses: true });
const runner = new Runner({ modelProvider, model: "tiny-gpt-oss", modelSettings: { temperature: 0 }, tracingDisabled: true });
const hello = "Hello! How can I help you today?";
const person = z.object({ name: z.enum(["Ada", "Grace"]), age: z.number().int().min(0).max(150) });
const greeter = new Agent({ name: "Greeter", instructions: "You greet people." });
const weather = tool({
  name: "get_weather",
  description: "Get the weather of a city.",
  parameters: z.object({ city: z.string() }),
  execute: async ({ city }) => JSON.stringify({ temperature: city === "Paris" ? 18 : 0, unit: "C" }),
});
const forecaster = new Agent({ name: "Forecaster", tools: [weather] });

async function streamed(agent, input, options = {}) {
  const result = await runner.run(agent, input, { ...options, stream: true });
  const text = (await Array.fromAsync(result.toTextStream())).join("");
  await result.completed;
  assert.equal(result.finalOutput, text);
  return result;
}

test("text", async () => {
  const result = await runner.run(greeter, "Say hello.");
  assert.equal(result.finalOutput, hello);
});

test("streamed text, with its usage", async () => {
  const result = await streamed(greeter, "Say hello.");
  assert.equal(result.finalOutput, hello);
  const { inputTokens, outputTokens } = result.state.usage;
  assert.ok(inputTokens > 0 && outputTokens > 0);
});

test("a tool round trip", async () => {
  const result = await runner.run(forecaster, "What is the weather in Paris?");
  assert.equal(result.finalOutput, "It is 18 °C in Paris right now.");
  const kinds = result.newItems.map((item) => item.type).filter((kind) => kind !== "reasoning_item");
  assert.deepEqual(kinds, ["tool_call_item", "tool_call_output_item", "message_output_item"]);
});

test("a streamed tool round trip", async () => {
  const result = await runner.run(forecaster, "What is the weather in Paris?", { stream: true });
  await result.completed;
  assert.equal(result.finalOutput, "It is 18 °C in Paris right now.");
});

test("structured output", async () => {
  const author = new Agent({ name: "Author", outputType: person });
  const result = await runner.run(author, "Say hello.");
  person.parse(result.finalOutput);
});

test("a conversation continued by the id of its response", async () => {
  const first = await runner.run(greeter, "Remember the number seven.");
  const second = await streamed(greeter, "What did I say before?", { previousResponseId: first.lastResponseId });
  assert.equal(second.finalOutput, "You asked me to remember the number seven.");
});

const sessions = { memory: () => new MemorySession(), server: () => new OpenAIConversationsSession({ client }) };

for (const [place, open] of Object.entries(sessions)) {
  test(`a session, kept in ${place}`, async () => {
    const session = open();
    await runner.run(greeter, "Remember the number seven.", { session });
    const second = await runner.run(greeter, "What did I say before?", { session });
    assert.equal(second.finalOutput, "You asked me to remember the number seven.");
  });
}

test("tools that the server runs", async () => {
  const calculator = hostedMcpTool({ serverLabel: "calculator", serverUrl: process.env.DOCUMENTS_URL });
  const worker = new Agent({ name: "Worker", tools: [calculator, codeInterpreterTool()] });
  const added = await runner.run(worker, "Add 2 and 3 with the calculator server.");
  assert.equal(added.finalOutput, "2 plus 3 is 5.");
  const doubled = await streamed(worker, "Set x to 20 in Python, then double it.");
  assert.equal(doubled.finalOutput, "Twice 20 is 40.");
});

test("a search in files", async () => {
  const store = await waterworks(client);
  const tools = [fileSearchTool(store.id, { includeSearchResults: true })];
  const searcher = new Agent({ name: "Searcher", tools, modelSettings: { toolChoice: "file_search", temperature: 0 } });
  for (const run of [(input) => runner.run(searcher, input), (input) => streamed(searcher, input)]) {
    const result = await run(question);
    const call = result.newItems.find((item) => item.type === "tool_call_item").rawItem;
    assert.equal(call.name, "file_search_call");
    assert.deepEqual(call.providerData.results.map((each) => each.filename).sort(), ["gate.txt", "pipe.txt"]);
  }
  await client.vectorStores.delete(store.id);
});

const program = `found = await asyncio.gather(*(look(number=number) for number in range(3)))
total = sum(each["number"] for each in found)
print(total, (await look(number=total))["number"])`;
const look = tool({
  name: "look",
  description: "Look a number up.",
  parameters: z.object({ number: z.number().int() }),
  execute: async ({ number }) => ({ number: 7 * number }),
  allowedCallers: ["programmatic"],
});

for (const stream of [false, true]) {
  test(`the calls of a program, stream: ${stream}`, async () => {
    const own = new OpenAI({ baseURL: `${process.env.PROGRAMMING_URL}/v1`, apiKey: "none" });
    const programmers = new Runner({
      modelProvider: new OpenAIProvider({ openAIClient: own, useResponses: true }), model: "agent", tracingDisabled: true,
    });
    const programmer = new Agent({ name: "Programmer", tools: [programmaticToolCallingTool(), look] });
    const result = await programmers.run(programmer, `run ${JSON.stringify(program)}\nsay {result}`, { stream });
    if (stream) await result.completed;
    assert.equal(result.finalOutput.trim(), "21 147");
  });
}
