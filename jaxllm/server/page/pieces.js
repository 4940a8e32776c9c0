// Values with units, and pieces of the page that keep their nodes: nothing flickers, and selections stay.
// What comes from the server is inserted as text alone: request ids are chosen by clients.

export const NONE = "–";

export const byId = (id) => document.getElementById(id);

// Values

const digits = (value, most, least = 0) =>
  new Intl.NumberFormat("en", { maximumFractionDigits: most, minimumFractionDigits: least }).format(value);

const significant = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });

export function precise(value) {
  const size = Math.abs(value);
  return size < 1 ? significant.format(value) : digits(value, size < 10 ? 2 : size < 100 ? 1 : 0);
}

export const count = (value) => digits(value, 0);
export const compact = (value) => (Math.abs(value) < 1e6 ? count(value) : `${precise(value / 1e6)} M`);
export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
export const percent = (ratio) => `${digits(100 * ratio, Math.abs(ratio) < 0.1 ? 1 : 0)} %`;
export const factor = (value) => `× ${digits(value, 2, 2)}`;
export const known = (value, format) => (value === null || value === undefined ? NONE : format(value));
export const clock = (unixSeconds) => new Date(1000 * unixSeconds).toLocaleTimeString("en-GB");

export function milliseconds(value) {
  return Math.abs(value) < 1000 ? `${precise(value)} ms` : seconds(value / 1000);
}

// The same with as many decimals in every row of a column.
export function cost(value) {
  if (value < 0.1 || value >= 1000) return milliseconds(value);
  const decimals = value < 10 ? 2 : value < 100 ? 1 : 0;
  return `${digits(value, decimals, decimals)} ms`;
}

export function seconds(value) {
  if (value < 60) return `${digits(value, value < 10 ? 1 : 0)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(value % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 24 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log2(Math.max(value, 1)) / 10));
  return `${precise(value / 1024 ** power)} ${units[power]}`;
}

// Nodes

export function make(parent, tag, className = "", text = "") {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text;
  return parent.appendChild(node);
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setClass(node, className) {
  if (node.className !== className) node.className = className;
}

export function sized(parent, length, add) {
  while (parent.children.length > length) parent.lastElementChild.remove();
  while (parent.children.length < length) add();
  return [...parent.children];
}

export function fillDefinitions(list, items) {
  const add = () => {
    const item = make(list, "div");
    make(item, "dt");
    const value = make(item, "dd");
    make(value, "span");
    make(value, "small");
    make(item, "dd", "under");
  };
  sized(list, items.length, add).forEach((item, i) => {
    const { name, value, unit = "", under = "", className = "" } = items[i];
    setClass(item, className);
    setText(item.children[0], name);
    setText(item.children[1].children[0], value);
    setText(item.children[1].children[1], unit);
    setText(item.children[2], under);
  });
}

// A cell is a text (a number's), or has a class that says what its mark stands for; `share` fills a mark.
export function fillRows(body, rows, numColumns, empty) {
  const all = rows.length ? rows : [[{ text: empty, className: "empty" }]];
  sized(body, all.length, () => make(body, "tr")).forEach((row, i) => fillRow(row, all[i], numColumns));
}

function fillRow(row, cells, numColumns) {
  const add = () => {
    const cell = make(row, "td");
    make(cell, "i").ariaHidden = "true";
    make(cell, "bdi");
  };
  sized(row, cells.length, add).forEach((node, j) => {
    const cell = typeof cells[j] === "string" ? { text: cells[j] } : cells[j];
    const { text, className = "number", mark = "", share = 0, title = "" } = cell;
    const [markNode, textNode] = node.children;
    setClass(node, className);
    setClass(markNode, mark);
    markNode.style.setProperty("--share", `${100 * Math.min(1, share)}%`);
    setText(textNode, text);
    if (node.title !== title) node.title = title;
    node.colSpan = cells.length === 1 ? numColumns : 1;
  });
}

export function showTip(event, text) {
  const tip = byId("tip");
  tip.hidden = !text;
  if (!text) return;
  setText(tip, text);
  const { width, height } = tip.getBoundingClientRect();
  const fits = event.clientX + 14 + width < innerWidth;
  const left = Math.max(4, fits ? event.clientX + 14 : event.clientX - 14 - width);
  const top = Math.min(event.clientY + 14, innerHeight - height - 4);
  tip.style.transform = `translate(${left}px, ${top}px)`;
}
