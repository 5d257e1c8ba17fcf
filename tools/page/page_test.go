package page

import (
	"bytes"
	"context"
	"fmt"
	"image/png"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
)

// images is where the pictures of the documentation are.
const images = "../../docs/images"

// picture writes what the browser shows as a PNG, down to a height; zero: to the end of the page.
func (b *browser) picture(name string, width, height int64, phone bool) {
	b.t.Helper()
	var options []chromedp.EmulateViewportOption
	if phone {
		options = append(options, chromedp.EmulateMobile)
	}
	if height == 0 {
		b.do(chromedp.EmulateViewport(width, 800, options...))
		height = evaluate[int64](b, "Math.ceil(document.documentElement.scrollHeight)")
	}
	b.do(chromedp.EmulateViewport(width, height, options...))
	time.Sleep(100 * time.Millisecond) // the layout settles; nothing in the test depends on it
	shot, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
	if err != nil {
		b.t.Fatal(err)
	}
	picture, err := png.Decode(bytes.NewReader(shot))
	if err != nil {
		b.t.Fatal(err)
	}
	var out bytes.Buffer
	encoder := png.Encoder{CompressionLevel: png.BestCompression}
	if err := encoder.Encode(&out, fewColours(picture)); err != nil {
		b.t.Fatal(err)
	}
	path := filepath.Join(images, name+".png")
	if err := os.WriteFile(path, out.Bytes(), 0o644); err != nil {
		b.t.Fatal(err)
	}
	b.t.Logf("%s: %d KB", path, out.Len()/1024)
	if out.Len() > 150<<10 {
		b.t.Errorf("%s has %d KB", path, out.Len()/1024)
	}
}

// fits fails if the page is wider than the window.
func (b *browser) fits(what string) {
	b.t.Helper()
	if !b.is("document.documentElement.scrollWidth <= window.innerWidth") {
		b.t.Errorf("%s: the page is %s px wide in a window of %s px", what, b.text("document.documentElement.scrollWidth"), b.text("window.innerWidth"))
	}
}

func scheme(name string) chromedp.Action[chromedp.Void] {
	return call(emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}}})
}

func scripts(enabled bool) chromedp.Action[chromedp.Void] {
	return call(emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{Value: !enabled})
}

// call makes an action of a command of the browser's protocol that returns nothing.
func call[P any](command cdp.Command[P, cdp.Empty], params P) chromedp.Action[chromedp.Void] {
	return chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
		_, err := cdp.Call(ctx, t, command, params)
		return err
	})
}

const hostile = `<script>window.pwned=1</script><img src=x onerror="window.pwned=1">`

func TestPageInABrowser(t *testing.T) {
	c := newCluster(t)
	port := c.serve("web-1")
	other := c.serve("web-2")
	failed := c.work()
	here := "127.0.0.1:" + port
	url := "http://" + here + "/"
	b := open(t)

	t.Run("Views", func(t *testing.T) {
		b.t = t
		b.do(scheme("light"), chromedp.EmulateViewport(1100, 900), chromedp.Navigate(url))
		b.await(`document.getElementById('connection').textContent === 'Live.'`)
		for _, text := range []string{"2 replicas", "Needs you", "tasks of kind thumbnail wait: no replica knows the kind", "connection refused", "import-orders --day 2026-11-23", "nightly-backup", "crm-api", "web-2"} {
			b.await(fmt.Sprintf("document.body.innerText.includes(%q)", text))
		}
		b.await(`document.querySelectorAll('#schedules .cell').length >= 40 && !document.querySelector('#schedules').innerText.includes('never')`)
		b.fits("the overview")
		b.picture("page", 1100, 0, false)
		b.do(scheme("dark"))
		b.picture("page-dark", 1100, 0, false)
		if colour := b.text("getComputedStyle(document.body).backgroundColor"); colour != "rgb(20, 24, 27)" {
			t.Errorf("in the dark the ground is %s", colour)
		}
		b.do(scheme("light"), chromedp.EmulateViewport(390, 844, chromedp.EmulateMobile))
		b.fits("the overview on a phone")
		b.picture("page-phone", 390, 1240, true)
		b.do(chromedp.EmulateViewport(1100, 900), chromedp.Navigate(fmt.Sprintf("%stasks/%d", url, failed)))
		for _, text := range []string{"attempt 2 ended: failed", "ledger differs by 12.40 EUR", "17 rows do not add up", "Others on the lock key", "before", "after", fmt.Sprintf("SELECT onejob.retry(%d);", failed)} {
			b.await(fmt.Sprintf("document.body.innerText.includes(%q)", text))
		}
		b.fits("the story")
		b.picture("page-task", 1100, 0, false)
		b.do(chromedp.EmulateViewport(390, 844, chromedp.EmulateMobile))
		b.fits("the story on a phone")
		b.do(chromedp.EmulateViewport(1100, 900))
		b.quiet(here)
	})

	t.Run("Find", func(t *testing.T) {
		b.t = t
		find := func(text string) {
			b.do(chromedp.Navigate(url), chromedp.SendKeys(chromedp.CSS(`input[name=q]`), text+"\r"))
		}
		find(fmt.Sprint(failed))
		b.await(fmt.Sprintf(`location.pathname === '/tasks/%d'`, failed))
		find("ledger")
		b.await(fmt.Sprintf(`location.pathname === '/find' && document.querySelector('a[href="tasks/%d"]') !== null`, failed))
		b.do(chromedp.Click(chromedp.CSS(fmt.Sprintf(`a[href="tasks/%d"]`, failed))))
		b.await(fmt.Sprintf(`location.pathname === '/tasks/%d'`, failed))
		find("thumbnail")
		b.await(`document.querySelector('main').innerText.includes('thumbnail') && document.querySelectorAll('main tbody tr').length === 1`)
		b.quiet(here)
	})

	t.Run("ItIsLive", func(t *testing.T) {
		b.t = t
		b.do(chromedp.Navigate(url))
		b.await(`document.getElementById('connection').textContent === 'Live.'`)
		b.is(`(window.marker = 1) === 1`)
		c.sql(`INSERT INTO onejob.tasks (kind, payload) VALUES ('exec', '{"command": "import-orders", "args": ["--day", "2026-11-24"]}')`)
		took := b.await(`document.querySelector('#running').innerText.includes('2026-11-24')`)
		t.Logf("a task was on the page %v after its INSERT", took)
		if !b.is(`window.marker === 1`) {
			t.Error("the page was loaded again")
		}
		b.is(`getSelection().selectAllChildren(document.querySelector('.verdict')), true`)
		c.sql(`INSERT INTO onejob.tasks (kind, payload) VALUES ('exec', '{"command": "import-orders", "args": ["--day", "2026-11-25"]}')`)
		time.Sleep(5 * time.Second) // two snapshots
		if b.is(`document.querySelector('#running').innerText.includes('2026-11-25')`) {
			t.Error("the page changed while somebody was copying from it")
		}
		b.is(`getSelection().removeAllRanges(), true`)
		b.await(`document.querySelector('#running').innerText.includes('2026-11-25')`)
		b.quiet(here)
	})

	t.Run("NothingInARowRuns", func(t *testing.T) {
		b.t = t
		b.do(chromedp.Navigate(url))
		b.await(`document.getElementById('connection').textContent === 'Live.'`)
		id := c.sql(`INSERT INTO onejob.tasks (kind, queue, payload, lock_key, status, error, result, finished_at)
		             VALUES ($1, $1, jsonb_build_object('a', $1::text), $1, 'failed', $1, jsonb_build_object('a', $1::text), now()) RETURNING id`, hostile)
		c.sql(`INSERT INTO onejob.attempts (task_id, fence, attempt, lock_key, replica, session, started_at, finished_at, outcome, error, output)
		       VALUES ($1, 1, 1, $2, $2, gen_random_uuid(), now(), now(), 'failed', $2, $2)`, id, hostile)
		c.sql(`INSERT INTO onejob.tasks (kind, queue, payload) VALUES ($1, $1, '{}') RETURNING id`, hostile)
		b.await(`document.querySelector('#needs').innerText.includes('<img src=x') && document.querySelector('#queues').innerText.includes('<script>')`)
		safe := func(view string) {
			t.Helper()
			if !b.is(`window.pwned === undefined && document.querySelector('main img, main script') === null`) {
				t.Errorf("%s: what a row holds was run", view)
			}
		}
		safe("the overview, live")
		b.do(chromedp.Navigate(url))
		safe("the overview")
		b.do(chromedp.Navigate(fmt.Sprintf("%stasks/%d", url, id)))
		b.await(`document.querySelector('#attempts').innerText.includes('<img src=x') && document.querySelector('#payload').innerText.includes('<img src=x')`)
		safe("the story")
		b.quiet(here)
		c.sql(`DELETE FROM onejob.tasks WHERE queue = $1`, hostile)
	})

	t.Run("WithoutJavaScript", func(t *testing.T) {
		b.t = t
		b.do(scripts(false), chromedp.Navigate(url))
		html := b.text("document.documentElement.outerHTML") // the browser's own scripts still run
		for _, text := range []string{"import-orders --day 2026-11-23", "nightly-backup", `http-equiv="refresh"`} {
			if !strings.Contains(html, text) {
				t.Errorf("%q is missing", text)
			}
		}
		b.do(scripts(true))
		b.quiet(here)
	})

	t.Run("NameOfAWebsite", func(t *testing.T) {
		b.t = t
		b.do(chromedp.Navigate("http://evil.example.com:" + port + "/"))
		if text := b.text("document.body.innerText"); !strings.Contains(text, "http.hosts") || strings.Contains(text, "import-orders") {
			t.Errorf("it shows %s", text)
		}
		b.forget()
	})

	t.Run("Token", func(t *testing.T) {
		b.t = t
		const token = "correct-horse-battery"
		guarded := c.serve("web-3", "ONEJOB_HTTP_LISTEN=0.0.0.0:0", "ONEJOB_HTTP_READ_TOKEN="+token)
		// As after a browser has asked for it.
		b.do(chromedp.Navigate("http://anybody:" + token + "@127.0.0.1:" + guarded + "/"))
		b.do(chromedp.Navigate("http://127.0.0.1:" + guarded + "/"))
		b.await(`document.getElementById('connection').textContent === 'Live.'`)
		b.forget()
	})

	t.Run("Acting", func(t *testing.T) {
		b.t = t
		const token = "wrong-horse-battery"
		tokens := filepath.Join(t.TempDir(), "act-tokens")
		if err := os.WriteFile(tokens, []byte("alice "+token+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		// On an open address, where browsers say with the origin alone where a form comes from.
		port := c.serve("web-4", "ONEJOB_HTTP_LISTEN=0.0.0.0:0", "ONEJOB_HTTP_ACT_TOKENS_FILE="+tokens)
		url := "http://127.0.0.1:" + port + "/"
		press := func(button string) {
			t.Helper()
			b.await(fmt.Sprintf(`document.querySelector(%q) !== null`, button))
			b.do(chromedp.Click(chromedp.CSS(button)))
			b.await(`document.querySelector('#result.done') !== null`)
		}
		recorded := func(action string, n int64) {
			t.Helper()
			if found := c.sql(`SELECT count(*) FROM onejob.actions WHERE action = $1 AND who LIKE '%(alice on the page)'`, action); found != n {
				t.Errorf("%s: %d on record, want %d", action, found, n)
			}
		}
		id := c.sql(`INSERT INTO onejob.tasks (kind, payload, status, error, finished_at) VALUES ('noop', '{}', 'failed', 'exit status 7', now()) RETURNING id`)
		b.do(chromedp.Navigate("http://alice:" + token + "@127.0.0.1:" + port + "/")) // as after a browser has asked
		for _, javaScript := range []bool{true, false} {
			c.sql(`UPDATE onejob.tasks SET status = 'failed', error = 'exit status 7', finished_at = now() WHERE id = $1`, id)
			b.do(scripts(javaScript), chromedp.Navigate(fmt.Sprintf("%stasks/%d", url, id)))
			press(fmt.Sprintf(`form[action="%d/retry"] button`, id))
			c.until(id, `status = 'succeeded'`)
			b.do(chromedp.Click(chromedp.CSS("#task")))
			b.await(fmt.Sprintf(`location.pathname === '/tasks/%d' && document.querySelector('h1').innerText.includes('succeeded')`, id))
		}
		b.do(scripts(true))
		recorded("retry", 2)

		b.do(chromedp.Navigate(url))
		b.await(`document.getElementById('connection').textContent === 'Live.'`)
		b.do(chromedp.Click(chromedp.CSS(`a[href="queue?name=mail"]`)))
		b.await(`location.pathname === '/queue'`)
		b.fits("the form")
		b.do(chromedp.SendKeys(chromedp.CSS(`input[name=reason]`), "the provider is down"), chromedp.SendKeys(chromedp.CSS(`input[name=for]`), "2h"))
		press(`form.fields button`)
		recorded("pause queue", 1)
		b.do(chromedp.Click(chromedp.CSS("#back")))
		b.await(`document.getElementById('connection').textContent === 'Live.' && document.querySelector('#queues .badge[title*="the provider is down"]') !== null`)
		b.fits("the overview with buttons")
		press(`button[aria-label="Resume queue mail"]`)
		recorded("resume queue", 1)
		b.do(chromedp.Click(chromedp.CSS("#back")))
		b.await(`document.querySelector('a[href="queue?name=mail"]') !== null`)

		b.do(chromedp.Click(chromedp.CSS(`a[href="limit?name=crm-api"]`)))
		b.await(`location.pathname === '/limit' && document.querySelector('input[name=slots]').value === '2'`)
		b.do(chromedp.SendKeys(chromedp.CSS(`input[name=slots]`), "5"))
		press(`form.fields button`)
		b.await(`document.querySelector('#result').innerText.includes('Limit crm-api has')`)
		recorded("resize limit", 1)
		b.do(chromedp.Navigate(url))
		b.await(`document.getElementById('connection').textContent === 'Live.'`)
		press(`button[aria-label="Run schedule month-end now"]`)
		recorded("run schedule", 1)
		b.do(chromedp.Click(chromedp.CSS("#back")))
		press(`button[aria-label="Enable schedule month-end"]`)
		recorded("enable schedule", 1)
		b.do(chromedp.Click(chromedp.CSS("#back")))
		b.await(`document.querySelector('button[aria-label="Disable schedule month-end"]') !== null`)

		c.sql(`INSERT INTO onejob.tasks (kind, payload, status, error, finished_at) SELECT 'noop', '{}', 'failed', 'step ' || i || ' of 100% failed', now() - interval '1 second' FROM generate_series(1, 5) i`)
		b.await(`document.querySelector('form[action="failures/retry?kind=noop"] button') !== null`)
		press(`form[action="failures/retry?kind=noop"] button`)
		b.await(`document.querySelector('#result').innerText.includes('chooses 5 tasks') && document.querySelector('#result').innerText.includes('step %')`)
		b.do(chromedp.Click(chromedp.CSS("#result button")))
		b.await(`document.querySelector('#result').innerText.includes('5 tasks retried')`)
		b.do(chromedp.EmulateViewport(390, 844, chromedp.EmulateMobile), chromedp.Navigate(url))
		b.await(`document.getElementById('connection').textContent === 'Live.'`)
		b.fits("the overview with buttons on a phone")
		b.do(chromedp.EmulateViewport(1100, 900))
		b.quiet("127.0.0.1:"+port, "alice:"+token+"@127.0.0.1:"+port)
	})

	t.Run("ActingWithoutAToken", func(t *testing.T) {
		b.t = t
		b.do(chromedp.Navigate(url))
		b.await(`document.getElementById('connection').textContent === 'Live.'`)
		if b.is(`document.querySelector('main form, main button') !== null`) {
			t.Error("there is something to press")
		}
		b.quiet(here)
	})

	t.Run("TheOtherReplica", func(t *testing.T) {
		b.t = t
		b.do(chromedp.Navigate("http://127.0.0.1:" + other + "/"))
		b.await(`document.body.innerText.includes('Served by web-2')`)
		b.quiet("127.0.0.1:" + other)
	})
}
