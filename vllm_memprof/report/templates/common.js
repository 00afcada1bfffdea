"use strict";
// What the scripts of all pages share: colours, the frame of a plot, tables that sort, paper.

const CONFIG = { displaylogo: false, responsive: true, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };

// A word of the page in its language, by its English template.
const WORDS = JSON.parse((document.getElementById("words") || { textContent: "{}" }).textContent);

function say(template, params) {
  return (WORDS[template] || template).replace(/\{(\w+)\}/g, (_, name) => params[name]);
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

// Plotly reads a little markup in texts: names of the record are text.
function plain(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function base(height, margin) {
  const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line") };
  const paper = "paper" in document.documentElement.dataset;
  return {
    height: height, width: paper ? 660 : undefined, margin: margin, paper_bgcolor: colour("page"), plot_bgcolor: colour("page"),
    font: { color: colour("text"), family: getComputedStyle(document.body).fontFamily, size: 12 },
    hoverlabel: { bgcolor: colour("panel"), bordercolor: colour("line"), font: { color: colour("text") } },
    xaxis: { ...axis }, yaxis: { ...axis },
    modebar: { bgcolor: "transparent", color: colour("soft"), activecolor: colour("text") },
  };
}

function narrow() {
  return document.documentElement.clientWidth < 600;
}

// Ascending, descending, as it was. What is unknown stays last.
function sortable(table) {
  const body = table.tBodies[0];
  const original = Array.from(body.rows);
  table.querySelectorAll("thead th").forEach((head, column) => {
    const press = head.querySelector("button");
    if (press) press.addEventListener("click", () => {
      const now = { none: "ascending", ascending: "descending", descending: "none" }[head.getAttribute("aria-sort")];
      table.querySelectorAll("thead th").forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", now);
      body.append(...(now === "none" ? original : original.slice().sort((a, b) => compare(a.cells[column], b.cells[column], now === "ascending" ? 1 : -1))));
    });
  });
}

function compare(a, b, sign) {
  const unknown = (cell) => !cell || cell.dataset.v === "";
  if (unknown(a) || unknown(b)) return Number(unknown(a)) - Number(unknown(b));
  if (a.dataset.v !== undefined && b.dataset.v !== undefined) return sign * (Number(a.dataset.v) - Number(b.dataset.v));
  return sign * a.textContent.localeCompare(b.textContent, undefined, { numeric: true });
}

// Draws again where the light or the width changed. Paper is light, and nothing on it can be opened.
function keepDrawn(redraw) {
  const repaint = () => redraw.forEach((draw) => draw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  matchMedia("(max-width: 599px)").addEventListener("change", repaint);
  addEventListener("beforeprint", () => {
    document.documentElement.dataset.paper = "";
    document.querySelectorAll("details:not([open])").forEach((part) => { part.open = true; part.dataset.opened = ""; });
    repaint();
  });
  addEventListener("afterprint", () => {
    delete document.documentElement.dataset.paper;
    document.querySelectorAll("details[data-opened]").forEach((part) => { part.open = false; delete part.dataset.opened; });
    repaint();
  });
}

// A link of the contents opens the section that it leads to.
function openTarget() {
  const part = document.getElementById(location.hash.slice(1))?.closest("details");
  if (part) part.open = true;
}

addEventListener("hashchange", openTarget);
openTarget();
document.querySelectorAll("table").forEach((table) => { if (table.tHead) sortable(table); });
