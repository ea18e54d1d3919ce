// Browsers start no workers in a page that is opened from a disk (file://). The search of the theme
// needs one: here it runs in a hidden frame instead, with the part of Worker's interface it uses.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.ready = new Promise((resolve) => { frame.onload = () => resolve(frame.contentWindow) })
      frame.srcdoc = "<!doctype html><title>search</title>"
      document.body.append(frame)
      this.ready = this.ready.then((inside) => new Promise((resolve, reject) => {
        // The script calls postMessage to answer, and listens for messages of this page.
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
        inside.importScripts = () => Promise.resolve()
        const script = inside.document.createElement("script")
        script.src = new URL(url, location.href).href
        script.onload = () => resolve(inside)
        script.onerror = () => reject(new Error(`cannot load ${url}`))
        inside.document.body.append(script)
      }))
    }

    postMessage(data) {
      this.ready.then((inside) => {
        inside.dispatchEvent(new inside.MessageEvent("message", { data }))
      })
    }
  }
}
