// Asks the search of a built site, as its page does: node docs/site/query.mjs SITE QUERY...
// Prints a line of JSON for each query: the pages that it finds, best first, each with its title.
import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import vm from "node:vm";

const [site, ...queries] = process.argv.slice(2);
const workers = join(site, "assets/javascripts/workers");
const program = readdirSync(workers).find((name) => /^search\..*\.js$/.test(name));
const answers = [];
const listeners = [];
const context = vm.createContext({
  addEventListener: (_, listener) => listeners.push(listener),
  postMessage: (message) => answers.push(message),
  location: new URL("file:///search.js"),
  console, URL, setTimeout, performance,
});
context.self = context;
context.window = context;
vm.runInContext(readFileSync(join(workers, program), "utf8"), context);

vm.runInContext(readFileSync(new URL("questions.js", import.meta.url), "utf8"), context);

async function ask(type, data) {
  for (const listener of listeners) await listener({ data: { type, data } });
  return answers.pop();
}

const index = JSON.parse(readFileSync(join(site, "search/search_index.json"), "utf8"));
await ask(0, { ...index, options: { suggest: false } });
for (const query of queries) {
  const { items } = (await ask(2, context.withoutFillers(query))).data;
  console.log(JSON.stringify(items.map(([page]) => ({ page: page.location, title: page.title, score: page.score }))));
}
