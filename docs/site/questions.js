// What a reader asks, as the search gets it: without the words that every page has, which would match the beginnings of
// others ("a": "agent"). The search leaves them out of its index, and puts an asterisk behind each word of a question.
globalThis.withoutFillers = (question) => {
  const fillers = /^(a|an|and|are|as|at|be|can|do|does|for|from|how|i|in|is|it|my|of|on|or|that|the|there|this|to|what|when|where|which|why|with|you|your)\??$/i;
  const words = question.split(/\s+/).filter(Boolean);
  const left = words.filter((word) => !fillers.test(word));
  return (left.length ? left : words).join(" ").replace(/\?$/, "");
};

if (typeof Worker === "function") {
  const send = Worker.prototype.postMessage;
  const QUERY = 2; // of the messages of the theme's search
  Worker.prototype.postMessage = function (message, ...rest) {
    const asks = message?.type === QUERY && typeof message.data === "string";
    return send.call(this, asks ? { ...message, data: withoutFillers(message.data) } : message, ...rest);
  };
}
