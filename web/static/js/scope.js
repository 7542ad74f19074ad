// In the form of an alert target: events of the whole appliance cannot be chosen while the scope is a tenant.
document.addEventListener("change", ({ target }) => {
  if (!target.matches("select[name=tenant_id]")) return;
  target.form.querySelectorAll("[data-appliance-only]").forEach((box) => (box.disabled = target.value !== ""));
});
