// Keeps the rows of requests in flight in place, so that nothing moves under the pointer when a request ends. Its row is marked
// as ended and stays until a new request takes the place, or for a while, and as long as the pointer or focus is in the table.
// The list of recent requests on the overview is not updated while the pointer or the focus is in it.
(() => {
  const ENDED_ROW_MS = 20_000;
  const live = document.getElementById("live");
  if (!live) return;
  const rowsOf = (part) => [...part.querySelectorAll("tr[id^=live-]")];

  const markEnded = (row) => {
    const endedRow = row.cloneNode(true);
    endedRow.dataset.endedAt ??= Date.now();
    endedRow.classList.add("ended");
    Object.assign(endedRow.querySelector("td.state .badge"), { className: "badge", textContent: "ended" });
    endedRow.querySelector("button")?.setAttribute("disabled", "");
    return endedRow;
  };

  document.addEventListener("htmx:before:swap", ({ detail: { tasks } }) => {
    const fragment = tasks.find((task) => task.target === live)?.fragment;
    const recent = live.querySelector("#recent:is(:hover, :focus-within)"); // on the overview: its rows are links
    if (recent) fragment?.querySelector("#recent")?.replaceWith(recent.cloneNode(true));
    const body = fragment && rowsOf(fragment)[0]?.parentElement;
    if (!body) return;
    const incoming = new Map(rowsOf(fragment).map((row) => [row.id, row]));
    const shown = rowsOf(live).map((row) => ({ row, now: incoming.get(row.id) }));
    shown.forEach(({ now }) => now && incoming.delete(now.id));
    const added = [...incoming.values()];
    const rows = shown.map(({ row, now }) => now ?? added.shift() ?? markEnded(row));
    const isInUse = live.querySelector("tbody")?.matches(":hover, :focus-within");
    const isExpired = ({ dataset: { endedAt } }) => endedAt && !isInUse && Date.now() - endedAt > ENDED_ROW_MS;
    while (rows.at(-1)?.dataset.endedAt) rows.pop(); // the last row can go: nothing below it moves
    body.replaceChildren(...rows.filter((row) => !isExpired(row)), ...added);
  });
})();
