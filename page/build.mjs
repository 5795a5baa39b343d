// Build the committed bundle, elastic_driver/page/, from src/. Run by `make page`.

import { createHash } from "node:crypto";
import { copyFile, mkdir, readdir, readFile, stat } from "node:fs/promises";
import { build } from "esbuild";

const OUT = "../elastic_driver/page";
const MOST_BYTES = 150_000;

await mkdir(OUT, { recursive: true });
const sources = [...(await readdir("src")).map((name) => `src/${name}`), "build.mjs", "package.json", "package-lock.json"];
const sum256 = createHash("sha256"); // tests/test_page_bundle.py computes the same
for (const name of sources.sort()) sum256.update(name).update(await readFile(name));
const banner = { js: `/* made by make page; sources: ${sum256.digest("hex")} */` };
const common = { bundle: true, minify: true, charset: "utf8", legalComments: "inline", target: "es2022" };
await build({ ...common, entryPoints: ["src/main.js"], format: "iife", banner, outfile: `${OUT}/app.js` });
await build({ ...common, entryPoints: ["src/app.css"], outfile: `${OUT}/app.css` });
for (const name of ["index.html", "icon.svg"]) await copyFile(`src/${name}`, `${OUT}/${name}`);
await copyFile("node_modules/uplot/LICENSE", `${OUT}/LICENSE-uplot.txt`);
let sum = 0;
for (const name of ["index.html", "icon.svg", "app.js", "app.css"]) {
  const { size } = await stat(`${OUT}/${name}`);
  console.log(`${String(size).padStart(7)} ${name}`);
  sum += size;
}
console.log(`${String(sum).padStart(7)} of at most ${MOST_BYTES} bytes`);
if (sum >= MOST_BYTES) process.exit(1);
