// The live badge: "Live" while updates arrive, "Stale" after five seconds without one; and the pause button.
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
})();
