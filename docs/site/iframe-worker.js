// Lets the search work in pages that were opened from a disk: browsers start no workers there, so its program runs in a
// hidden frame instead, which gets and sends the same messages. Everywhere else nothing is changed.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onerror = null;
      this.onmessage = null;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.frame = frame;
      const inner = frame.contentWindow;
      this.deliver = (data) => inner.dispatchEvent(new MessageEvent("message", { data }));
      inner.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      inner.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => load(inner.document, each)), Promise.resolve());
      this.ready = load(inner.document, new URL(url, document.baseURI).href);
    }

    postMessage(data) {
      this.ready.then(() => this.deliver(data));
    }

    terminate() {
      this.frame.remove();
    }
  };

  function load(page, url) {
    return new Promise((resolve, reject) => {
      const script = page.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = reject;
      page.body.appendChild(script);
    });
  }
}
