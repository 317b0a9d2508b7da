// openai-node: OpenAI's own client in JavaScript.

import assert from "node:assert/strict";
import test from "node:test";
import OpenAI, { toFile } from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { gate, pipe, question, waterworks } from "./waterworks.mjs";

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

test("vector stores: files, a batch, a search, a response that searches", async () => {
  const store = await waterworks(client);
  const { files } = client.vectorStores;
  const made = await files.uploadAndPoll(store.id, await toFile(Buffer.from("Turbines turn."), "turbine.txt"));
  assert.equal(made.status, "completed");
  const labelled = await files.update(made.id, { vector_store_id: store.id, attributes: { part: "turbine", year: 1895 } });
  assert.deepEqual(labelled.attributes, { part: "turbine", year: 1895 });
  const filters = { type: "gt", key: "year", value: 1890 };
  const found = await Array.fromAsync(client.vectorStores.search(store.id, { query: "turbine", filters }));
  assert.deepEqual(found.map((each) => [each.filename, each.content[0].text]), [["turbine.txt", "Turbines turn."]]);
  const stream = client.responses.stream({
    model,
    temperature,
    input: question,
    tools: [{ type: "file_search", vector_store_ids: [store.id] }],
    tool_choice: { type: "file_search" },
    include: ["file_search_call.results"],
  });
  const kinds = (await Array.fromAsync(stream)).map((event) => event.type);
  const steps = ["in_progress", "searching", "completed"].map((step) => `response.file_search_call.${step}`);
  assert.deepEqual(kinds.filter((kind) => kind.includes("file_search")).slice(0, 3), steps);
  const call = (await stream.finalResponse()).output.find((item) => item.type === "file_search_call");
  assert.deepEqual(call.results.map((result) => result.text).sort(), [pipe, gate]);
  assert.equal((await client.vectorStores.delete(store.id)).deleted, true);
});

test("a container: a file sent to it, code that runs in it, its files", async () => {
  const container = await client.containers.create({ name: "of node" });
  const { files } = client.containers;
  const file = await files.create(container.id, { file: await toFile(Buffer.from("1,2"), "a.csv") });
  assert.equal(await (await files.content.retrieve(file.id, { container_id: container.id })).text(), "1,2");
  const tools = [{ type: "code_interpreter", container: container.id }];
  const response = await client.responses.create({ model, temperature, tools, input: "Set x to 20 in Python, then double it." });
  const calls = response.output.filter((item) => item.type === "code_interpreter_call");
  assert.deepEqual(calls.map((call) => call.container_id), [container.id, container.id]);
  assert.deepEqual((await Array.fromAsync(files.list(container.id))).map((each) => each.id), [file.id]);
  await client.containers.delete(container.id);
  await assert.rejects(client.containers.retrieve(container.id), OpenAI.NotFoundError);
});
