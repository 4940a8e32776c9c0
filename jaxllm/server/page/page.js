// The live page: asks for `live` once a second while it is seen, and shows the answer.

import { redraw, showCharts, showScatter } from "./charts.js";
import { byId, bytes, clock, compact, cost, count, factor, fillDefinitions, fillRows, known } from "./pieces.js";
import { make, milliseconds, percent, plural, precise, seconds, setClass, setText, sized } from "./pieces.js";
import { showPool } from "./pool.js";

const POLL_MS = 1000;
const TIMEOUT_MS = 5000;

// What is shown

function show(live) {
  showHead(live);
  showTiles(live);
  showPool(live);
  showCharts(live);
  showDecisions(live);
  showPredictions(live);
  showTotals(live);
}

function showHead(live) {
  setText(byId("version"), live.version);
  setText(byId("model"), live.model);
  setText(byId("policy"), live.policy);
  setText(byId("uptime"), seconds(live.now - live.started));
  const title = `${live.model} · jaxllm`;
  if (document.title !== title) document.title = title;
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

function showTiles({ limits, queues, history, latencies, totals }) {
  const latest = (key, numSeconds) => history[key].slice(-numSeconds).filter((value) => value !== null);
  const rate = (key) => {
    const values = latest(key, 10);
    return values.length ? precise(sum(values) / values.length) : "0";
  };
  const median = (key) => {
    const [value, unit] = known(latencies[`${key}_ms`], milliseconds).split(/ (.*)/);
    return { value, unit, under: `median, p99 ${known(latencies[`${key}_p99_ms`], milliseconds)}` };
  };
  const ofAtMost = (most) => `of at most ${count(most)}`;
  const refused = `${count(sum(history.refused))} in 5 minutes`;
  const counters = [
    { name: "Running", value: count(queues.running), under: ofAtMost(limits.max_num_seqs), className: "green" },
    { name: "Waiting", value: count(queues.waiting), under: ofAtMost(limits.max_queued_requests), className: "amber" },
    { name: "Swapped", value: count(queues.swapped), under: "their KV is on the host", className: "violet" },
    { name: "Refused", value: count(totals.refused), under: refused, className: "red" },
  ];
  const speed = { unit: "tokens/s", under: "mean of 10 s" };
  fillDefinitions(byId("tiles"), [
    ...counters,
    { name: "Output", value: rate("output_tokens"), ...speed, className: "blue" },
    { name: "Prompts", value: rate("prompt_tokens"), ...speed, className: "teal" },
    { name: "First token", ...median("ttft"), className: "blue" },
    { name: "End to end", ...median("e2e"), className: "teal" },
  ]);
}

function showDecisions({ decisions }) {
  const predicted = (value, isDone) => ({ text: known(value, cost), className: isDone ? "number done" : "number" });
  const why = "of some of its iterations it is not known how long they ran: it took this at most";
  const atMost = (value) => `≤ ${cost(value)}`;
  const rows = decisions.map((one) => {
    const isSwap = one.action === "swap";
    const isBound = one.measured_ms === null && one.bound_ms !== null;
    const regret = isBound ? one.regret_bound_ms : one.regret_ms;
    const title = isBound ? why : one.is_back ? "" : "it is not back yet";
    return [
      { text: clock(one.time), className: "" },
      { text: one.request_id, className: "id", title: one.request_id },
      { text: one.action, className: isSwap ? "state swap" : "state recompute" },
      { text: count(one.num_blocks), title: plural(one.num_tokens, "token") },
      predicted(one.swap_ms, isSwap),
      predicted(one.recompute_ms, !isSwap),
      { text: isBound ? atMost(one.bound_ms) : known(one.measured_ms, cost), title },
      { text: known(regret, isBound && regret > 0 ? atMost : cost), className: regret > 0 ? "number regret" : "number" },
    ];
  });
  fillRows(byId("decisions"), rows, 8, "Nobody has been preempted: there were blocks for all.");
  showScatter(decisions);
}

function showPredictions({ predictions }) {
  const rows = Object.entries(predictions).map(([kind, one]) => [
    { text: kind.replaceAll("_", " "), className: "" },
    count(one.count),
    known(one.error, percent),
    factor(one.factor),
  ]);
  fillRows(byId("predictions"), rows, 4, "Nothing has been predicted yet.");
}

function draftsOf(drafts) {
  if (!drafts) return [];
  const share = drafts.drafted > 0 ? `${percent(drafts.kept / drafts.drafted)} of ${compact(drafts.drafted)}` : "";
  const { measured_gain: measured, predicted_gain: predicted } = drafts;
  const said = predicted === null ? "" : `predicted ${factor(predicted)}`;
  return [
    { name: "Drafts kept", value: compact(drafts.kept), unit: share },
    { name: "Tokens/s with drafts over without", value: known(measured, factor), unit: said },
  ];
}

function showTotals({ totals, drafts }) {
  // Prompt tokens are those that were computed.
  const lookedUp = totals.cached_tokens + totals.prompt_tokens - totals.recomputed_tokens;
  const share = lookedUp > 0 ? `${percent(totals.cached_tokens / lookedUp)} of prompts` : "";
  fillDefinitions(byId("totals"), [
    { name: "Requests", value: compact(totals.requests) },
    { name: "Output tokens", value: compact(totals.output_tokens) },
    { name: "Prompt tokens computed", value: compact(totals.prompt_tokens) },
    { name: "Found in the cache", value: compact(totals.cached_tokens), unit: share },
    { name: "Swapped", value: plural(totals.preemptions_swap, "time") },
    { name: "Dropped", value: plural(totals.preemptions_recompute, "time") },
    { name: "Tokens recomputed", value: compact(totals.recomputed_tokens) },
    { name: "Copied to the host and back", value: bytes(totals.swapped_bytes) },
    ...draftsOf(drafts),
  ]);
}

// Asking

let last = null; // the last answer that was shown
let replica = ""; // of several, whose answers are shown

// Behind one address there may be several engines; one that has gone is followed by another.
function showReplicas(headers) {
  const names = headers.get("x-jaxllm-replicas")?.split(",") ?? [];
  replica = headers.get("x-jaxllm-replica") ?? "";
  byId("replicas").hidden = names.length < 2;
  const add = () => make(byId("replica"), "option");
  sized(byId("replica"), names.length, add).forEach((option, i) => {
    setText(option, names[i]);
    option.selected = names[i] === replica;
  });
}

byId("replica").addEventListener("change", (event) => {
  replica = event.target.value;
  run();
});

// Shows an answer; returns what is wrong, in one word or two and in sentences, or null.
async function ask() {
  let response, content;
  const wanted = replica;
  try {
    const signal = AbortSignal.timeout(TIMEOUT_MS);
    const url = replica ? `live?replica=${encodeURIComponent(replica)}` : "live";
    response = await fetch(url, { credentials: "same-origin", cache: "no-store", signal });
    content = await response.text();
  } catch {
    return ["away", "The server does not answer."];
  }
  if (replica !== wanted) return null; // it has been chosen meanwhile, and is asked
  if (response.status === 401) {
    return ["not allowed", "The server wants its API key: reload, and give it as the password (status 401)."];
  }
  if (!response.ok) return ["failing", `The server answers with status ${response.status}.`];
  try {
    const live = JSON.parse(content);
    showReplicas(response.headers);
    show(live);
    last = live;
  } catch (error) {
    const text = `This page does not understand the server's answer (${error.message}).`;
    return ["not understood", `${text} Reload it if the server was updated.`];
  }
  if (last.is_healthy) return null;
  return ["unhealthy", "The engine has failed, and requests end with an error. The server's log says why."];
}

async function poll() {
  const problem = await ask();
  const isStale = problem !== null && problem[0] !== "unhealthy";
  const since = isStale && last ? ` What is below is as of ${clock(last.now)}.` : "";
  byId("main").classList.toggle("stale", isStale);
  byId("main").ariaBusy = String(last === null);
  const compiling = problem === null && last?.compiling;
  const progress = compiling && `compiling ${compiling.num_compiled} of ${compiling.num_programs}`;
  setClass(byId("health"), problem ? "health bad" : compiling ? "health busy" : "health good");
  setText(byId("health").lastElementChild, problem ? problem[0] : compiling ? progress : "healthy");
  byId("health").title = compiling ? "Requests that need a program which is not there yet wait for it." : "";
  byId("banner").hidden = problem === null;
  setText(byId("banner"), problem ? `${problem[1]}${since}` : "");
}

let timer = null;

async function run() {
  clearTimeout(timer);
  timer = null;
  if (document.hidden) return;
  await poll();
  timer ??= setTimeout(run, POLL_MS);
}

document.addEventListener("visibilitychange", run);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("resize", redraw);
redraw();
run();
