package web

import (
	"cmp"
	"encoding/json"
	"fmt"
	"html/template"
	"math"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5/pgtype"

	"onejob/internal/plaintext"
	"onejob/internal/snapshot"
	"onejob/store"
)

// longestLine is how much is shown of a text for which there is one line, in characters.
const longestLine = 300

// hidden stands in place of what the configuration hides.
const hidden = "hidden by http.hide_payloads"

// hides reports whether payloads, results, output and errors of a kind are not shown. The last
// line of a command's output is part of its error.
func (p *page) hides(kind string) bool { return slices.Contains(p.cfg.HidePayloads, kind) }

// storyView is a task as the page shows it.
type storyView struct {
	store.Story
	Payload string
	Result  string
	Error   string
	Target  string
	Events  []moment
	CLI     []string
	SQL     []string
}

// moment is something that happened to a task.
type moment struct {
	At    store.Time
	Text  string
	Class string
}

// storyOf prepares a task.
func (p *page) storyOf(s store.Story) storyView {
	v := storyView{Story: s, Payload: pretty(s.Payload), Result: pretty(s.Result)}
	if s.Row.Error != nil {
		v.Error = *s.Row.Error
	}
	v.Target = snapshot.Target(s.Kind, json.RawMessage(s.Payload.Text))
	if v.Target == s.Payload.Text {
		v.Target = "" // it is shown as the payload
	}
	if p.hides(s.Kind) {
		v.Payload, v.Target = hidden, ""
		v.Why = "" // it has the error, or the command
		if v.Result != "" {
			v.Result = hidden
		}
		if v.Error != "" {
			v.Error = hidden
		}
		v.Attempts = slices.Clone(s.Attempts)
		for i := range v.Attempts {
			if v.Attempts[i].Error != "" {
				v.Attempts[i].Error = hidden
			}
			if v.Attempts[i].OutputLength > 0 {
				v.Attempts[i].Output, v.Attempts[i].OutputCut = hidden, false
			}
		}
	}
	v.Events = momentsOf(v)
	v.CLI = []string{fmt.Sprintf("onejob tasks show %d", s.ID)}
	v.SQL = []string{
		fmt.Sprintf("SELECT * FROM onejob.tasks WHERE id = %d;", s.ID),
		fmt.Sprintf("SELECT * FROM onejob.attempts WHERE task_id = %d ORDER BY fence;", s.ID),
	}
	if s.Status == "pending" || s.Status == "running" {
		v.CLI = append(v.CLI, fmt.Sprintf("onejob tasks cancel %d", s.ID))
		v.SQL = append(v.SQL, fmt.Sprintf("SELECT onejob.cancel(%d);", s.ID))
	}
	if s.Status != "running" {
		v.CLI = append(v.CLI, fmt.Sprintf("onejob tasks retry %d", s.ID))
		v.SQL = append(v.SQL, fmt.Sprintf("SELECT onejob.retry(%d);", s.ID))
	}
	return v
}

// momentsOf lists what happened to a task, in order.
func momentsOf(v storyView) []moment {
	var list []moment
	add := func(at *store.Time, class, format string, args ...any) {
		if at != nil && at.Infinite == pgtype.Finite {
			list = append(list, moment{*at, fmt.Sprintf(format, args...), class})
		}
	}
	add(&v.CreatedAt, "", "created")
	switch {
	case v.Status == "pending" && v.RunAt.Infinite == pgtype.Infinity:
	case v.Status == "pending" && v.Row.Attempt > 0:
		add(&v.RunAt, "", "due for attempt %d of %d", v.Row.Attempt+1, v.MaxAttempts)
	default:
		add(&v.RunAt, "", "due")
	}
	for _, a := range slices.Backward(v.Attempts) {
		replica := cmp.Or(a.Replica, "an unknown replica")
		add(&a.StartedAt, "", "attempt %d claimed by %s, fence %d", a.Attempt, replica, a.Fence)
		add(a.BegunAt, "", "attempt %d: the handler began", a.Attempt)
		add(a.StoppedAt, "", "attempt %d: the handler stopped", a.Attempt)
		text := fmt.Sprintf("attempt %d ended: %s", a.Attempt, a.Outcome)
		if a.Error != "" {
			text += ": " + plaintext.FirstLine(a.Error, longestLine)
		}
		add(&a.FinishedAt, a.Outcome, "%s", text)
	}
	if v.Status == "running" && v.StartedAt != nil && v.Fence != nil && v.Replica != nil {
		add(v.StartedAt, "running", "attempt %d claimed by %s, fence %d; it is running", v.Row.Attempt, *v.Replica, *v.Fence)
	}
	add(v.FinishedAt, v.Status, "%s", v.Status)
	slices.SortStableFunc(list, func(a, b moment) int { return a.At.At.Compare(b.At.At) })
	return list
}

// pretty returns JSON with indents, and says what is missing.
func pretty(t store.Text) string {
	switch {
	case t.Text == "" && !t.Cut:
		return ""
	case t.Text == "":
		return fmt.Sprintf("It is too long to be shown: %d bytes as they are stored.", t.Length)
	case t.Cut:
		return t.Text + fmt.Sprintf("\n[cut: it has %d bytes as they are stored]", t.Length)
	}
	return string(snapshot.Indent([]byte(t.Text)))
}

// functions are those of the templates.
func (p *page) functions() template.FuncMap {
	return template.FuncMap{
		"v":    visible,
		"line": func(s string) string { return visible(plaintext.FirstLine(s, longestLine)) },
		"target": func(r snapshot.RunningTask) string {
			if p.hides(r.Kind) {
				return hidden
			}
			return visible(plaintext.FirstLine(r.Target, longestLine))
		},
		// progress hides the text of a kind that is hidden, not the percentage.
		"progress": func(kind string, said *store.TaskProgress) store.TaskProgress {
			shown := *said
			if p.hides(kind) && shown.Text != "" {
				shown.Text = hidden
			}
			return shown
		},
		"since": func(now, t time.Time) string { return snapshot.Seconds(max(0, now.Sub(t))).String() + " ago" },
		"need": func(n snapshot.Need) string {
			text := n.Text
			if n.Kind != "" && p.hides(n.Kind) {
				text = n.Without
			}
			return visible(plaintext.FirstLine(text, longestLine))
		},
		"failure": func(f snapshot.Failure) string {
			if p.hides(f.Kind) {
				return hidden
			}
			return visible(plaintext.FirstLine(f.Error, longestLine))
		},
		"str": func(s *string) string {
			if s == nil {
				return ""
			}
			return visible(*s)
		},
		"utc": utc,
		"utcp": func(t *store.Time) string {
			if t == nil {
				return ""
			}
			return utc(*t)
		},
		"iso":  func(t store.Time) string { return t.At.UTC().Format(time.RFC3339) },
		"zone": inZone,
		"ago": func(now time.Time, t store.Time) string {
			if d, ok := (store.Time{At: now}).Sub(t); ok && d >= 0 {
				return snapshot.Seconds(d).String() + " ago"
			} else if ok {
				return "in " + snapshot.Seconds(-max(d, -math.MaxInt64)).String() // there is no -math.MinInt64
			}
			return t.String()
		},
		"took": func(from, to store.Time) string {
			if d, ok := to.Sub(from); ok {
				return snapshot.Seconds(max(d, 0)).String()
			}
			return ""
		},
		"join":   func(list []string) string { return visible(strings.Join(list, ", ")) },
		"letter": letter,
		"nav": func(root, query string) map[string]string {
			return map[string]string{"Root": root, "Query": query}
		},
		"acts":  func() bool { return p.cfg.ActTokens != nil },
		"hides": p.hides,
		"exact": func(t time.Time) string { return t.UTC().Format(time.RFC3339Nano) },
		"stale": func(s *snapshot.Snapshot, block string) *snapshot.Stale { return s.StaleBlock(block) },
	}
}

// utc shows a time to the second.
func utc(t store.Time) string {
	if t.Infinite != pgtype.Finite {
		return t.String()
	}
	return t.At.UTC().Format("2006-01-02 15:04:05")
}

// inZone shows a time in a zone, or in UTC if this machine does not know the zone.
func inZone(t *store.Time, zone string) string {
	switch {
	case t == nil:
		return ""
	case t.Infinite == pgtype.Infinity:
		return "never"
	case t.Infinite != pgtype.Finite:
		return t.String()
	}
	loc, err := time.LoadLocation(zone)
	if err != nil {
		loc = time.UTC
	}
	return t.At.In(loc).Format("2006-01-02 15:04:05 -07:00")
}

var letters = map[string]string{"succeeded": "✓", "failed": "✕", "running": "▸", "pending": "…", "cancelled": "–", "deleted": "·"}

// letter stands for what became of an occurrence: not only the colour says it.
func letter(became string) string {
	return cmp.Or(letters[became], visible(became[:min(1, len(became))])) // missed, overlap, capped
}

// visible returns s with characters that nobody sees, or that turn the direction of text,
// written as in a Go string literal. Line feeds and tabs stay.
func visible(s string) string {
	var b strings.Builder
	for _, r := range strings.ReplaceAll(strings.ToValidUTF8(s, "\ufffd"), "\r\n", "\n") {
		switch {
		case unicode.IsGraphic(r) || r == '\n' || r == '\t':
			b.WriteRune(r)
		case r < 0x80:
			fmt.Fprintf(&b, `\x%02x`, r)
		case r < 0x10000:
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			fmt.Fprintf(&b, `\U%08x`, r)
		}
	}
	return b.String()
}
