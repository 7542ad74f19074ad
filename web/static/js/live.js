// Keeps the live badge honest: "Live" while ticks arrive, "Stale" after five seconds without one, and a pause button.
(() => {
  const STALE_AFTER_MS = 5000;
  const status = document.querySelector("[data-live]");
  if (!status) return;
  const text = status.querySelector("[data-live-text]");
  const pause = status.querySelector("[data-live-pause]");
  let lastTick = Date.now();
  let paused = false;

  const show = () => {
    const state = paused ? "paused" : Date.now() - lastTick > STALE_AFTER_MS ? "stale" : "live";
    if (status.dataset.live === state) return;
    status.dataset.live = state;
    text.textContent = { live: "Live", stale: "Stale", paused: "Paused" }[state];
  };

  document.addEventListener("htmx:sse:before:message", (event) => {
    const kind = event.detail.message.event;
    if (kind === "signed-out") return void location.reload();
    lastTick = Date.now();
    if (paused) event.preventDefault();
    show();
  });
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Resume" : "Pause";
    show();
  });
  setInterval(show, 1000);

  // While requests are in flight their table keeps the height that it once took: the history below stays where it is.
  const live = document.getElementById("live");
  const hold = () => (live.style.minHeight = live.querySelector("[id^=live-req]") ? `${live.offsetHeight}px` : "");
  // On the overview tenants come and go several times a second: their list takes height at once and gives it back after a while.
  const HELD_MS = 20_000;
  let held = [];
  const holdShares = () =>
    live.querySelectorAll(".shares").forEach((list, i) => {
      list.style.minHeight = "";
      const height = list.offsetHeight;
      if (!(held[i]?.height > height && Date.now() - held[i].since < HELD_MS)) held[i] = { height, since: Date.now() };
      list.style.minHeight = `${held[i].height}px`;
    });
  document.addEventListener("htmx:after:swap", (event) => event.detail.ctx?.target === live && (hold(), holdShares()));
  holdShares();
  addEventListener("resize", () => ((live.style.minHeight = ""), (held = [])));
})();
