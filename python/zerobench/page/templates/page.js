"use strict";
(() => {
  // Sorting: a second press turns the order round; cells without a number stay at the end of numeric columns.
  const order = (index, sign, numeric) => (one, other) => {
    const [a, b] = [one.cells[index], other.cells[index]];
    if (!numeric) return sign * a.textContent.localeCompare(b.textContent, "en", { numeric: true });
    const [left, right] = [a, b].map((cell) => (cell.dataset.sort === "" ? NaN : Number(cell.dataset.sort)));
    if (Number.isNaN(left) || Number.isNaN(right)) return Number.isNaN(left) - Number.isNaN(right);
    return left === right ? 0 : sign * (left < right ? -1 : 1);
  };

  const sort = (table, head) => {
    const ascending = head.getAttribute("aria-sort") !== "ascending";
    for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const rows = [...table.tBodies[0].rows];
    const numeric = rows.some((row) => row.cells[head.cellIndex].dataset.sort !== "");
    table.tBodies[0].append(...rows.sort(order(head.cellIndex, ascending ? 1 : -1, numeric)));
  };

  // Filtering: a row stays if it has every word.
  const filter = (input) => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [...document.getElementById(input.dataset.filters).tBodies[0].rows];
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    const shown = rows.filter((row) => !row.hidden).length;
    input.parentElement.querySelector("output").textContent = `${shown} of ${rows.length} rows shown`;
  };

  // A link to a row opens its details.
  const open = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target instanceof HTMLDetailsElement) target.open = true;
  };

  const config = (width) => ({
    background: null,
    font: "system-ui, sans-serif",
    view: { stroke: null },
    axis: {
      domainColor: "var(--muted)", gridColor: "var(--line)", tickColor: "var(--muted)", labelColor: "var(--ink)",
      titleColor: "var(--ink)", labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal",
    },
    axisY: { labelLimit: Math.min(340, 0.4 * width) },
    axisX: { labelLimit: 120, labelOverlap: true, tickCount: Math.max(3, Math.min(8, Math.round(width / 110))) },
    legend: {
      orient: "bottom", columns: Math.max(1, Math.floor(width / 230)), labelColor: "var(--ink)", titleColor: "var(--ink)",
      labelLimit: Math.min(300, 0.8 * width), labelFontSize: 12, symbolLimit: 60,
    },
    text: { color: "var(--ink)", fontSize: 11 },
    bar: { stroke: "var(--muted)", strokeWidth: 0.5, color: "#0072B2" },
    line: { strokeWidth: 2 },
    range: {
      category: ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#AA4499", "#999933", "#888888"],
    },
  });

  const draw = async () => {
    const specs = JSON.parse(document.getElementById("charts").textContent);
    for (const [id, spec] of Object.entries(specs)) {
      const place = document.getElementById(id);
      await vegaEmbed(place, { width: "container", autosize: { type: "fit-x", contains: "padding" }, ...spec }, {
        mode: "vega-lite", ast: true, renderer: "svg", actions: false, defaultStyle: false,
        config: config(place.clientWidth), tooltip: { disableDefaultStyle: true },
      });
      for (const select of place.querySelectorAll("select")) {
        select.setAttribute("aria-label", "Row whose samples are drawn");  // Vega leaves it without a name
      }
    }
    document.documentElement.dataset.drawn = String(Object.keys(specs).length);
  };

  for (const table of document.querySelectorAll("table.sortable")) {
    for (const head of table.tHead.rows[0].cells) {
      head.querySelector("button").addEventListener("click", () => sort(table, head));
    }
  }
  for (const input of document.querySelectorAll("input[data-filters]")) {
    input.addEventListener("input", () => filter(input));
  }
  window.addEventListener("hashchange", open);
  open();
  draw();
})();
