// Keeps every request in flight where it is in the table, so that nothing moves under the eye or the pointer when another ends.
// One that ended stays, marked so, until a new one takes its place; without a new one, for a while and while the table is in use.
// The list of recent requests on the overview stays as it is while the pointer or the focus is in it.
(() => {
  const KEPT_MS = 20_000;
  const live = document.getElementById("live");
  if (!live) return;
  const rowsOf = (part) => [...part.querySelectorAll("tr[id^=live-]")];

  const ended = (row) => {
    const kept = row.cloneNode(true);
    kept.dataset.endedAt ??= Date.now();
    kept.classList.add("ended");
    Object.assign(kept.querySelector("td.state .badge"), { className: "badge", textContent: "ended" });
    kept.querySelector("button")?.setAttribute("disabled", "");
    return kept;
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
    const rows = shown.map(({ row, now }) => now ?? added.shift() ?? ended(row));
    const inUse = live.querySelector("tbody")?.matches(":hover, :focus-within");
    const due = ({ dataset: { endedAt } }) => endedAt && !inUse && Date.now() - endedAt > KEPT_MS;
    while (rows.at(-1)?.dataset.endedAt) rows.pop(); // nothing is below it
    body.replaceChildren(...rows.filter((row) => !due(row)), ...added);
  });
})();
