"use strict";

// a click on a heading sorts the rows of its table; one device alone stays first
const number = (cell) => parseFloat(cell.textContent.replaceAll(",", "").replace("\u2212", "-"));
for (const heading of document.querySelectorAll("thead th")) {
  heading.addEventListener("click", () => {
    const body = heading.closest("table").tBodies[0];
    const sign = heading.ariaSort === "ascending" ? -1 : 1;
    for (const other of heading.parentNode.cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    const numeric = heading.classList.contains("number");
    const order = (one, other) => {
      const [a, b] = [one, other].map((row) => row.cells[heading.cellIndex]);
      if (!numeric) return sign * a.textContent.localeCompare(b.textContent);
      return isNaN(number(a)) - isNaN(number(b)) || sign * (number(a) - number(b));
    };
    const pinned = [...body.rows].filter((row) => row.classList.contains("pinned"));
    const others = [...body.rows].filter((row) => !row.classList.contains("pinned"));
    body.append(...pinned, ...others.sort(order));
  });
}

// a click on a name in a legend hides its run in all plots, and shows it again
const parts = [...document.querySelectorAll("[data-run]")];
const names = [...document.querySelectorAll("[data-legend]")];
for (const name of names) {
  const run = name.dataset.legend;
  const shown = parts.filter((part) => part.dataset.run === run);
  if (!shown.length) continue;
  shown.push(...names.filter((other) => other.dataset.legend === run));
  name.classList.add("toggle");
  name.addEventListener("click", () => {
    const off = !name.classList.contains("off");
    for (const part of shown) part.classList.toggle("off", off);
  });
}

// a link to a folded section opens it
const reveal = () => document.getElementById(location.hash.slice(1))?.setAttribute("open", "");
addEventListener("hashchange", reveal);
reveal();

// paper cannot be unfolded
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  for (const part of closed) part.open = true;
});
addEventListener("afterprint", () => {
  for (const part of closed) part.open = false;
});
