// Unpacks the browser that npm installed, and the libraries and fonts that it needs if the machine has none.

import { execFileSync } from "node:child_process";
import { createReadStream, createWriteStream, mkdirSync, rmSync } from "node:fs";
import { join } from "node:path";
import { pipeline } from "node:stream/promises";
import { createBrotliDecompress } from "node:zlib";

const packed = join(import.meta.dirname, "node_modules", "@sparticuz", "chromium", "bin");
const folder = join(import.meta.dirname, "node_modules", ".browser");

const unpack = (name, path, mode = 0o644) =>
  pipeline(createReadStream(join(packed, name)), createBrotliDecompress(), createWriteStream(path, { mode }));

mkdirSync(folder, { recursive: true });
for (const name of ["al2023", "fonts"]) {
  const archive = join(folder, `${name}.tar`);
  await unpack(`${name}.tar.br`, archive);
  execFileSync("tar", ["--extract", "--file", archive, "--directory", folder]);
  rmSync(archive);
}
await unpack("chromium.br", join(folder, "chromium"), 0o755);
