/* Pages of the operator: the key, which the tab keeps, and requests with it. */

const key = {
  get value() {
    return sessionStorage.getItem("penstock-operator") ?? "";
  },
  set value(value) {
    sessionStorage.setItem("penstock-operator", value);
  },
};

class Refused extends Error {
  constructor(status, message, param) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

async function refusal(answer) {
  const text = await answer.text();
  try {
    const { message, param } = JSON.parse(text).error;
    return new Refused(answer.status, message, param);
  } catch {
    return new Refused(answer.status, text.slice(0, 500) || answer.statusText);
  }
}

/* Returns a function that asks the server for what is below a path, relative to that of the page. */
function asking(base) {
  const below = new URL(base, new URL(".", document.baseURI)).href;
  return async (path, options = {}) => {
    const headers = { Authorization: `Bearer ${key.value}`, ...options.headers };
    const answer = await fetch(below + path, { ...options, headers, cache: "no-store" });
    if (!answer.ok) throw await refusal(answer);
    return answer;
  };
}
