// A vector store with two files, for the clients that search in it.

import { toFile } from "openai";

export const pipe = "A penstock is a pipe that leads water to a turbine.";
export const gate = "A penstock is also a gate, which holds water back.";

export const question = "Search the files for penstock.";

export async function waterworks(client) {
  const store = await client.vectorStores.create({ name: "waterworks" });
  const files = await Promise.all([toFile(Buffer.from(pipe), "pipe.txt"), toFile(Buffer.from(gate), "gate.txt")]);
  await client.vectorStores.fileBatches.uploadAndPoll(store.id, { files });
  return store;
}
