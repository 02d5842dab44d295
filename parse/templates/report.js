"use strict";
(() => {
  // What a cell is sorted by: its own value where it has one, else its text.
  const keyOf = (row, column) => {
    const cell = row.cells[column];
    return "value" in cell.dataset ? cell.dataset.value : cell.textContent.trim();
  };
  const collator = new Intl.Collator("en", { numeric: true, sensitivity: "base" });
  const isNumber = (text) => text !== "" && Number.isFinite(Number(text));

  const compare = (a, b) => {
    if (isNumber(a) && isNumber(b)) {
      return Number(a) - Number(b);
    }
    if (isNumber(a) !== isNumber(b)) {
      return isNumber(a) ? -1 : 1;
    }
    return collator.compare(a, b);
  };

  const sortBy = (table, column, heading) => {
    const descending = heading.getAttribute("aria-sort") === "ascending";
    for (const other of heading.parentElement.cells) {
      other.removeAttribute("aria-sort");
    }
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const body = table.tBodies[0];
    const rows = Array.from(body.rows, (row) => ({ row, key: keyOf(row, column) }));
    // What is missing stays at the end, whichever way the rest is sorted.
    const filled = rows.filter((item) => item.key !== "");
    const empty = rows.filter((item) => item.key === "");
    filled.sort((a, b) => (descending ? compare(b.key, a.key) : compare(a.key, b.key)));
    body.append(...filled.concat(empty).map((item) => item.row));
  };

  for (const table of document.querySelectorAll("table.sortable")) {
    Array.from(table.tHead.rows[0].cells).forEach((heading, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = heading.textContent;
      button.title = "sort";
      button.addEventListener("click", () => sortBy(table, column, heading));
      heading.replaceChildren(button);
    });
  }

  const root = document.documentElement;
  const button = document.getElementById("theme");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const label = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
  };
  const remember = (theme) => {
    try {
      window.localStorage.setItem("report-theme", theme);
    } catch {
      // Pages opened from a file may have no storage: then the choice lasts as long as the page.
    }
  };
  try {
    const kept = window.localStorage.getItem("report-theme");
    if (kept === "dark" || kept === "light") {
      root.dataset.theme = kept;
    }
  } catch {
    // See above.
  }
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remember(root.dataset.theme);
    label();
  });
  dark.addEventListener("change", label);
  button.hidden = false;
  label();
})();
