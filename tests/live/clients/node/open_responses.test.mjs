// The AI SDK with its Open Responses provider, which sends all items back.  It knows streamed reasoning only by OpenAI's
// name for the event; it reads everything else from either base URL.

import assert from "node:assert/strict";
import test from "node:test";
import { createOpenResponses } from "@ai-sdk/open-responses";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

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

for (const base of ["/v1", "/openresponses/v1"]) {
  const url = `${new URL(process.env.BASE_URL).origin}${base}/responses`;
  const model = createOpenResponses({ name: "penstock", url, apiKey: "none" })("tiny-gpt-oss");

  test(`${base}: text and reasoning`, async () => {
    const { text, reasoningText } = await generateText({ model, temperature, prompt: "Say hello." });
    assert.equal(text, hello);
    assert.equal(reasoningText, "The user wants a greeting.");
  });

  test(`${base}: streamed text`, async () => {
    const { textStream } = streamText({ model, temperature, prompt: "Say hello." });
    const pieces = await Array.fromAsync(textStream);
    assert.equal(pieces.join(""), hello);
  });

  test(`${base}: streamed reasoning`, async () => {
    const { fullStream } = streamText({ model, temperature, prompt: "Say hello." });
    const parts = await Array.fromAsync(fullStream);
    const thoughts = parts.filter((part) => part.type === "reasoning-delta").map((part) => part.text);
    assert.equal(thoughts.join(""), base === "/v1" ? "The user wants a greeting." : "");
  });

  test(`${base}: a tool round trip`, async () => {
    const prompt = "What is the weather in Paris?";
    const { text } = await generateText({ model, temperature, tools, prompt, stopWhen: stepCountIs(3) });
    assert.equal(text, "It is 18 °C in Paris right now.");
  });

  test(`${base}: structured output`, async () => {
    const output = Output.object({ schema: person });
    const result = await generateText({ model, temperature, output, prompt: "Say hello." });
    person.parse(result.output);
  });
}
