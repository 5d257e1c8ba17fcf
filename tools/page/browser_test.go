package page

import (
	"context"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	pagedomain "github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

// A browser has one page open, and remembers what that page did.
type browser struct {
	t   *testing.T
	ctx context.Context

	mu       sync.Mutex
	requests []string
	problems []string // what stands in the console, dialogs and exceptions
}

// open starts a Chromium that finds no host but this machine. evil.example.com leads to this
// machine, too: a website could make its name do so.
func open(t *testing.T) *browser {
	t.Helper()
	path := os.Getenv("ONEJOB_CHROMIUM_BIN")
	if path == "" {
		t.Fatal("ONEJOB_CHROMIUM_BIN is not set: make page-test")
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(path),
		chromedp.NoSandbox, // it may be root that tests; the pages are ours
		chromedp.Flag("host-resolver-rules", "MAP evil.example.com 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"),
		chromedp.Flag("force-color-profile", "srgb"),
		chromedp.WSURLReadTimeout(time.Minute))
	allocator, stop := chromedp.NewExecAllocator(t.Context(), options...)
	t.Cleanup(stop)
	ctx, end := chromedp.NewContext(allocator)
	t.Cleanup(end)
	b := &browser{t: t, ctx: ctx}
	if err := chromedp.Do(ctx); err != nil { // without a timeout, which would be the browser's
		t.Fatal(err)
	}
	if err := chromedp.Listen(ctx, func(event any) {
		b.mu.Lock()
		defer b.mu.Unlock()
		switch e := event.(type) {
		case *network.EventRequestWillBeSent:
			b.requests = append(b.requests, e.Request.URL)
		case *log.EventEntryAdded:
			b.problems = append(b.problems, e.Entry.Text+" "+e.Entry.URL)
		case *runtime.EventExceptionThrown:
			b.problems = append(b.problems, e.ExceptionDetails.Text)
		case *pagedomain.EventJavascriptDialogOpening:
			b.problems = append(b.problems, "a dialog: "+e.Message)
		}
	}); err != nil {
		t.Fatal(err)
	}
	return b
}

// do runs actions one after the other.
func (b *browser) do(actions ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, time.Minute)
	defer cancel()
	if err := chromedp.Do(ctx, actions...); err != nil {
		b.t.Fatal(err)
	}
}

// evaluate returns what an expression of JavaScript is.
func evaluate[T any](b *browser, expression string) T {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, time.Minute)
	defer cancel()
	value, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression))
	if err != nil {
		b.t.Fatalf("%s: %v", expression, err)
	}
	return value
}

// is evaluates an expression, such as one that is true when something has appeared.
func (b *browser) is(expression string) bool {
	b.t.Helper()
	return evaluate[bool](b, expression)
}

// text returns what an expression evaluates to.
func (b *browser) text(expression string) string {
	b.t.Helper()
	return evaluate[string](b, "String("+expression+")")
}

// await waits until an expression is true, and returns how long that took. It fails after ten
// seconds: the page changes every two. An error is no failure: the browser may be on its way to
// another page.
func (b *browser) await(expression string) time.Duration {
	b.t.Helper()
	began := time.Now()
	for {
		ctx, cancel := context.WithTimeout(b.ctx, time.Minute)
		is, err := chromedp.Run(ctx, chromedp.Evaluate[bool]("document.readyState === 'complete' && ("+expression+")"))
		cancel()
		if is && err == nil {
			return time.Since(began)
		}
		if time.Since(began) > 10*time.Second {
			b.t.Fatalf("not within 10 s (%v): %s; the page is\n%s", err, expression, b.text("document.body.innerText"))
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// quiet fails if the page asked anybody but these addresses for something, or anything stands
// in its console, and forgets what it did.
func (b *browser) quiet(addresses ...string) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.requests) == 0 {
		b.t.Error("no request was seen")
	}
	for _, url := range b.requests {
		ours := false
		for _, a := range addresses {
			ours = ours || strings.HasPrefix(url, "http://"+a+"/")
		}
		if !ours {
			b.t.Errorf("a request left: %s", url)
		}
	}
	for _, p := range b.problems {
		b.t.Errorf("the browser complains: %s", p)
	}
	b.requests, b.problems = nil, nil
}

// forget forgets what the page did.
func (b *browser) forget() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.requests, b.problems = nil, nil
}
