// Replaces the content of the page whenever the replica has a newer snapshot. While the page
// is not visible it asks for none.
'use strict';

// A form is sent once, however often its button is pressed, and whatever the page shows until the answer comes.
let sent = null; // where to
const buttons = (form, off) => form.querySelectorAll('button').forEach((b) => { b.disabled = off; });
const forms = (f) => document.querySelectorAll('form').forEach(f);
const hold = () => forms((f) => { if (f.action === sent) { buttons(f, true); } });
document.addEventListener('submit', (e) => { sent = e.target.action; setTimeout(hold); });
addEventListener('pageshow', () => { sent = null; forms((f) => buttons(f, false)); });

const main = document.querySelector('main[data-live]');
if (main && 'EventSource' in window) {
  const state = document.getElementById('connection');
  let source = null;

  const update = (html) => {
    if (!getSelection().isCollapsed && main.contains(getSelection().anchorNode)) {
      return; // somebody is copying
    }
    if (main.querySelector('a:active, button:active')) {
      return; // somebody is pressing
    }
    const named = (e) => e.getAttribute('aria-label') || e.getAttribute('href');
    const focused = main.contains(document.activeElement) ? named(document.activeElement) : null;
    main.innerHTML = html; // the server has escaped what rows hold
    hold();
    const verdict = main.querySelector('.verdict');
    if (verdict) {
      document.title = verdict.textContent.trim() + ' · onejob';
    }
    if (focused) {
      const same = [...main.querySelectorAll('a, button')].find((e) => named(e) === focused);
      if (same) {
        same.focus({ preventScroll: true });
      }
    }
  };

  const open = () => {
    source = new EventSource(main.dataset.live);
    source.addEventListener('snapshot', (e) => {
      update(e.data);
      main.classList.remove('lost');
      state.textContent = 'Live.';
    });
    source.onerror = () => {
      main.classList.add('lost');
      state.textContent = 'The replica does not answer; this page is not current.';
      if (source.readyState === EventSource.CLOSED) {
        setTimeout(() => { if (!document.hidden) { close(); open(); } }, 5000);
      }
    };
  };
  const close = () => {
    if (source) {
      source.close();
      source = null;
    }
  };

  document.addEventListener('visibilitychange', () => {
    if (document.hidden) {
      close();
    } else if (!source) {
      open();
    }
  });
  if (!document.hidden) {
    open();
  }
}
