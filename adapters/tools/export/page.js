// Sorts a table by a column: a button in each heading, which only appears where scripts run.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const button = document.createElement("button");
    button.append(...heading.childNodes);
    heading.append(button);
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    button.addEventListener("click", () => {
      const isNumber = [...body.rows].every((row) => row.cells[column].dataset.value !== undefined);
      // Numbers begin with the largest: that is what one looks for. Of times and names the first comes first.
      const isDown = heading.ariaSort ? heading.ariaSort === "ascending" : heading.classList.contains("number");
      const direction = isDown ? -1 : 1;
      for (const other of heading.parentNode.cells) other.removeAttribute("aria-sort");
      heading.ariaSort = isDown ? "descending" : "ascending";
      const compare = isNumber ? (a, b) => Number(value(a)) - Number(value(b))
        : (a, b) => value(a).localeCompare(value(b), "en", { numeric: true });
      body.append(...[...body.rows].sort((a, b) => direction * compare(a, b)));
    });
  });
}
