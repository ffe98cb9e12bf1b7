// Zooms the time axis. Everything on it has its place in percent, so only the width of the lanes changes.
{
  const timeline = document.querySelector(".timeline");
  const lanes = timeline?.querySelector(".lanes");
  const bar = document.querySelector(".zoom");
  const levels = [1, 4, 16, 64];
  const labelWidth = () => lanes.querySelector(".label").getBoundingClientRect().width;
  const windowWidth = () => timeline.clientWidth - labelWidth();
  let zoom = 1;
  // Zooms and scrolls so that the moment at `share` of the axis is `x` pixels right of the labels.
  const show = (newZoom, share, x) => {
    zoom = Math.min(Math.max(newZoom, 1), levels.at(-1) * 8);
    lanes.style.setProperty("--zoom", zoom);
    const level = levels.findLast((each) => each <= zoom * 1.01);
    if (level > 1) lanes.dataset.ticks = level; else delete lanes.dataset.ticks;
    timeline.scrollLeft = share * windowWidth() * zoom - x;
  };
  const around = (factor, x) => show(zoom * factor, (timeline.scrollLeft + x) / (windowWidth() * zoom), x);
  const showLife = (row) => {
    const from = Number(row.dataset.from), length = Math.max(Number(row.dataset.to) - from, 1e-9);
    show(0.7 / length, from, windowWidth() * 0.1);
  };
  const order = (byArrival) => {
    for (const log of lanes.querySelectorAll(".row.log")) {
      const rows = [];
      for (let row = log.nextElementSibling; row?.classList.contains("request"); row = row.nextElementSibling) rows.push(row);
      rows.forEach((row, place) => { row.dataset.place ??= place; });
      const key = byArrival ? "arrival" : "place";
      log.after(...rows.sort((a, b) => Number(a.dataset[key]) - Number(b.dataset[key])));
    }
  };
  if (lanes) {
    bar.hidden = false;
    bar.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button?.dataset.zoom === "all") show(1, 0, 0);
      else if (button?.dataset.zoom) around(button.dataset.zoom === "in" ? 2 : 0.5, windowWidth() / 2);
      else if (button) {
        const byArrival = button.ariaPressed !== "true";
        button.ariaPressed = String(byArrival);
        order(byArrival);
      }
    });
    timeline.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      const x = event.clientX - timeline.getBoundingClientRect().left - labelWidth();
      around(event.deltaY < 0 ? 1.25 : 0.8, Math.max(0, x));
    }, { passive: false });
    timeline.addEventListener("keydown", (event) => {
      if (event.key === "+") around(2, windowWidth() / 2);
      else if (event.key === "-") around(0.5, windowWidth() / 2);
      else if (event.key === "0") show(1, 0, 0);
    });
    lanes.addEventListener("click", (event) => {
      const row = event.target.closest(".row.request");
      if (row && !event.target.closest(".label")) showLife(row);
    });
  }
}

// Sorts a table by the column whose heading is clicked. The buttons exist only where scripts run.
for (const table of document.querySelectorAll("table.sortable")) {
  const groups = [...table.tBodies];  // of each request its row, and the row with its reasons
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const button = document.createElement("button");
    button.append(...heading.childNodes);
    heading.append(button);
    const cell = (group) => group.rows[0].cells[column];
    const value = (group) => cell(group).dataset.value ?? cell(group).textContent;
    button.addEventListener("click", () => {
      const isNumber = groups.every((group) => cell(group).dataset.value !== undefined);
      // Numbers are sorted with the largest first, times and names with the smallest first.
      const isDown = heading.ariaSort ? heading.ariaSort === "ascending" : heading.classList.contains("number");
      const direction = isDown ? -1 : 1;
      for (const other of heading.parentNode.cells) other.removeAttribute("aria-sort");
      heading.ariaSort = isDown ? "descending" : "ascending";
      const compare = isNumber ? (a, b) => Number(value(a)) - Number(value(b))
        : (a, b) => value(a).localeCompare(value(b), "en", { numeric: true });
      table.append(...groups.sort((a, b) => direction * compare(a, b)));
    });
  });
}
