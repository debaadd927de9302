// Settings: kept in this browser, but for the API key, which is kept nowhere.
const settings = {
  system: "", temperature: "0", top_p: "", max_completion_tokens: "512", seed: "", drafter: "", model: "",
  view: "colours", theme: "", keeps: true, learns: false,
};
const SAVED = "paceline.settings";

function loadSettings() {
  try {
    const saved = JSON.parse(localStorage.getItem(SAVED) || "{}");
    for (const name of Object.keys(settings)) if (typeof saved[name] === typeof settings[name]) settings[name] = saved[name];
  } catch { /* no storage: the defaults */ }
}

function saveSettings() {
  try { localStorage.setItem(SAVED, JSON.stringify(settings)); } catch { /* they last as long as the tab */ }
}

// Fields with data-setting show and change the setting of that name. changed: called with its name.
function bindSettings(changed) {
  for (const field of document.querySelectorAll("[data-setting]")) {
    const {setting} = field.dataset, isBox = field.type === "checkbox", isChoice = field.type === "radio";
    if (isBox || isChoice) field.checked = isBox ? settings[setting] : settings[setting] === field.value;
    else field.value = settings[setting];
    field.addEventListener(isBox || isChoice ? "change" : "input", () => {
      settings[setting] = isBox ? field.checked : field.value;
      saveSettings();
      changed(setting);
    });
    changed(setting);
  }
}

// The fields of a request that come from the settings.
function parameters() {
  const given = {seed: settings.seed === "" ? Math.floor(Math.random() * 2 ** 31) : Number(settings.seed)};
  for (const name of ["temperature", "top_p", "max_completion_tokens"]) if (settings[name] !== "") given[name] = Number(settings[name]);
  if (settings.drafter) given.speculative = {method: settings.drafter};
  if (!settings.learns) given.store = false;
  return given;
}

// The choices of a select, with the one that was chosen before, if it is still there.
function choices(select, all, chosen) {
  select.replaceChildren(...all.map(([value, name]) => new Option(name, value, false, value === chosen)));
  return all.some(([value]) => value === chosen) ? chosen : all[0]?.[0] || "";
}
