// The KV pool: each tier's blocks by who holds them, and the requests that do.

import { byId, bytes, count, fillRows, make, NONE, plural, seconds, setClass, setText } from "./pieces.js";
import { showTip, sized } from "./pieces.js";

const NUM_COLOURS = 12; // --r0 to --r11
const MOST_SEPARATE_BLOCKS = 160; // more are too narrow for lines between them

export function showPool(live) {
  const { pool, limits, requests } = live;
  const size = plural(limits.block_size, "token");
  setText(byId("pool-note"), `Blocks of ${size}, ${bytes(limits.block_bytes)} each, by the request that holds them.`);
  assignColours(requests);
  showBlocks(tiers.device, pool.device, requests, "device_blocks", limits.block_bytes);
  showBlocks(tiers.host, pool.host, requests, "host_blocks", limits.block_bytes);
  showFiles(tiers.disk, pool.disk);
  showRequests(live);
}

// Colours

const colours = new Map(); // request id -> number of its colour, which it keeps while it is among the largest

function assignColours(requests) {
  const size = (one) => one.device_blocks + one.host_blocks + (colours.has(one.id) ? 0.5 : 0);
  const largest = requests
    .filter((one) => one.device_blocks + one.host_blocks > 0)
    .sort((a, b) => size(b) - size(a) || b.age_seconds - a.age_seconds)
    .slice(0, NUM_COLOURS)
    .map((one) => one.id);
  for (const id of [...colours.keys()]) if (!largest.includes(id)) colours.delete(id);
  const taken = new Set(colours.values());
  const free = [...Array(NUM_COLOURS).keys()].filter((number) => !taken.has(number));
  for (const id of largest) if (!colours.has(id)) colours.set(id, free.shift());
}

const colourOf = (id) => (colours.has(id) ? `r${colours.get(id)}` : "others");

// Bars

function makeTier(title) {
  const tier = make(byId("tiers"), "div", "tier");
  const line = make(tier, "p");
  make(line, "b", "", title);
  const note = make(line, "span");
  const bar = make(tier, "div", "bar");
  bar.role = "img";
  bar.addEventListener("pointermove", (event) => showTip(event, event.target.tip));
  bar.addEventListener("pointerleave", (event) => showTip(event, ""));
  return { tier, title, note, bar };
}

const tiers = { device: makeTier("Device"), host: makeTier("Host"), disk: makeTier("Files") };

function showBlocks(tier, { total, held, cached, free }, requests, key, blockBytes) {
  const areSeparate = total > 0 && total <= MOST_SEPARATE_BLOCKS;
  const byRequest = partsOf(held, requests, key);
  const parts = [
    ...(areSeparate ? inWholeBlocks(byRequest) : byRequest),
    { size: cached, className: "cached", tip: `cached, held by nobody\n${plural(cached, "block")}` },
    { size: free, className: "free", tip: `free\n${plural(free, "block")}` },
  ];
  const whole = `${plural(total, "block")} (${bytes(total * blockBytes)})`;
  const text = `${count(held)} held, ${count(cached)} cached, ${count(free)} free, of ${whole}`;
  tier.bar.style.setProperty("--block", `${100 / Math.max(total, 1)}%`);
  showTier(tier, total ? text : "no blocks here", parts, areSeparate ? "bar blocks" : "bar");
}

// Requests that begin alike hold the same blocks; each has its part of what all hold.
function partsOf(held, requests, key) {
  const holders = requests.filter((one) => one[key] > 0).sort((a, b) => b.age_seconds - a.age_seconds);
  const claimed = holders.reduce((total, one) => total + one[key], 0);
  const scale = claimed > held ? held / claimed : 1;
  const parts = holders
    .filter((one) => colours.has(one.id))
    .map((one) => ({
      size: one[key] * scale,
      className: colourOf(one.id),
      tip: `${one.id}\n${one.status}, ${plural(one[key], "block")}${scale < 1 ? ", some shared" : ""}`,
    }));
  const rest = held - parts.reduce((total, part) => total + part.size, 0);
  const numOthers = holders.filter((one) => !colours.has(one.id)).length;
  const others = numOthers ? plural(numOthers, "other request") : "others";
  parts.push({ size: rest, className: "others", tip: `${others}\n${plural(Math.round(rest), "block")}` });
  return parts;
}

// Parts that end where blocks do; they are as long together.
function inWholeBlocks(parts) {
  let end = 0;
  return parts.map((part) => {
    const start = Math.round(end);
    end += part.size;
    return { ...part, size: Math.round(end) - start };
  });
}

function showFiles(tier, disk) {
  tier.tier.hidden = !disk;
  if (!disk) return;
  const free = Math.max(0, disk.limit_bytes - disk.bytes);
  const parts = [
    { size: disk.bytes, className: "disk", tip: `cached\n${bytes(disk.bytes)}` },
    { size: free, className: "free", tip: `free\n${bytes(free)}` },
  ];
  showTier(tier, `${bytes(disk.bytes)} cached, of ${bytes(disk.limit_bytes)}`, parts, "bar thin");
}

function showTier({ title, note, bar }, text, parts, className) {
  setText(note, text);
  setClass(bar, className);
  bar.ariaLabel = `${title}: ${text}`;
  const visible = parts.filter((part) => part.size > 1e-6);
  sized(bar, visible.length, () => make(bar, "i")).forEach((node, i) => {
    setClass(node, visible[i].className);
    node.style.flexGrow = visible[i].size;
    node.tip = visible[i].tip;
  });
}

// Requests

const STATUSES = ["running", "swapped", "waiting"];

function showRequests({ requests, queues }) {
  const order = (one) => STATUSES.indexOf(one.status);
  const sorted = [...requests].sort((a, b) => order(a) - order(b) || b.age_seconds - a.age_seconds);
  const total = queues.running + queues.waiting + queues.swapped;
  const all = sorted.length ? count(sorted.length) : "";
  setText(byId("requests-count"), total > sorted.length ? `${all} of ${count(total)}` : all);
  const empty = "Nobody is here. Send a request to /v1/completions or /v1/chat/completions, and it appears.";
  fillRows(byId("requests"), sorted.map(rowOf), 8, empty);
}

function rowOf(one) {
  const holdsBlocks = one.device_blocks + one.host_blocks > 0;
  return [
    { text: one.id, className: "id mark", mark: holdsBlocks ? colourOf(one.id) : "free", title: one.id },
    { text: one.status, className: `state ${STATUSES.includes(one.status) ? one.status : ""}` },
    count(one.num_prompt_tokens),
    {
      text: `${count(one.num_tokens)} / ${count(one.max_total_tokens)}`,
      className: "number share",
      share: one.num_tokens / one.max_total_tokens,
    },
    count(one.device_blocks),
    count(one.host_blocks),
    seconds(one.age_seconds),
    one.num_preemptions ? `${count(one.num_preemptions)} ×` : NONE,
  ];
}
