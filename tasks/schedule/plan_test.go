package schedule_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"onejob/tasks/schedule"
)

// clock is a time of one day, such as 12:00:05.
func clock(t *testing.T, text string) time.Time {
	t.Helper()
	at, err := time.Parse(time.DateTime, "2026-05-04 "+text)
	if err != nil {
		t.Fatal(err)
	}
	return at
}

// said writes down what a plan does: each due time, with ! and the reason if there is
// no task for it; then the next one, unless it stays as it is.
func said(p schedule.Plan) string {
	var b strings.Builder
	for _, o := range p.Occurrences {
		b.WriteString(o.Due.Format("15:04:05"))
		if o.Skipped != schedule.NotSkipped {
			fmt.Fprintf(&b, "!%s", o.Skipped)
		}
		b.WriteString(" ")
	}
	if !p.Keep {
		b.WriteString("next " + p.Next.Format("15:04:05"))
	}
	return strings.TrimSpace(b.String())
}

func TestPlan(t *testing.T) {
	t.Parallel()
	at := func(text string) *time.Time { c := clock(t, text); return &c }
	former := func(id int64, cron, next, begin, until string) schedule.Former {
		f := schedule.Former{ID: id, Cron: cron, Zone: "UTC", Until: clock(t, until)}
		if next != "" {
			f.Next = at(next)
		}
		if begin != "" {
			f.Begin = clock(t, begin)
		}
		return f
	}
	const minutely, half = "* * * * *", "30 * * * * *"
	for _, test := range []struct {
		name string
		d    schedule.Due
		now  string
		want string
		done []int64
	}{
		{"NotWorkedOutAndNoEditKnown", schedule.Due{Cron: minutely, OnMissed: "all"}, "12:03:10", "next 12:04:00", nil},
		{"DueSinceTheEdit", schedule.Due{Cron: minutely, OnMissed: "all", Begin: at("12:00:30")}, "12:03:10", "12:01:00 12:02:00 12:03:00 next 12:04:00", nil},
		{"DueSinceTheEditOne", schedule.Due{Cron: minutely, OnMissed: "one", Begin: at("12:00:30")}, "12:03:10", "12:01:00!missed 12:02:00!missed 12:03:00 next 12:04:00", nil},
		{"DueSinceTheEditSkipLate", schedule.Due{Cron: "0 12 * * *", OnMissed: "skip", Begin: at("11:59:30")}, "12:03:10", "12:00:00!missed next 12:00:00", nil},
		{"DueAtTheEditIsNotAfterIt", schedule.Due{Cron: minutely, OnMissed: "all", Begin: at("12:01:00")}, "12:01:10", "next 12:02:00", nil},
		{"WorkedOut", schedule.Due{Cron: minutely, OnMissed: "all", Next: at("12:01:00"), Begin: at("09:00:00")}, "12:02:10", "12:01:00 12:02:00 next 12:03:00", nil},
		{"OldAndNew", schedule.Due{Cron: half, OnMissed: "all", Begin: at("12:02:10"), Former: []schedule.Former{former(7, minutely, "12:01:00", "", "12:02:10")}},
			"12:04:00", "12:01:00 12:02:00 12:02:30 12:03:30 next 12:04:30", []int64{7}},
		{"DueAtTheEditIsOfTheOld", schedule.Due{Cron: half, OnMissed: "all", Begin: at("12:02:00"), Former: []schedule.Former{former(7, minutely, "12:02:00", "", "12:02:00")}},
			"12:02:10", "12:02:00 next 12:02:30", []int64{7}},
		{"SeveralEditsThatNobodySaw", schedule.Due{Cron: minutely, OnMissed: "all", Begin: at("12:03:10"),
			Former: []schedule.Former{former(7, minutely, "12:01:00", "", "12:01:10"), former(8, half, "", "12:01:10", "12:02:10"), former(9, minutely, "", "12:02:10", "12:03:10")}},
			"12:04:10", "12:01:00 12:01:30 12:03:00 12:04:00 next 12:05:00", []int64{7, 8, 9}},
		{"OneOfAll", schedule.Due{Cron: half, OnMissed: "one", Begin: at("12:02:10"), Former: []schedule.Former{former(7, minutely, "12:01:00", "", "12:02:10")}},
			"12:05:29", "12:01:00!missed 12:02:00!missed 12:02:30!missed 12:03:30!missed 12:04:30 next 12:05:30", []int64{7}},
		{"OneIsTheLastOfTheOld", schedule.Due{Cron: "0 15 * * *", OnMissed: "one", Begin: at("12:02:10"), Former: []schedule.Former{former(7, minutely, "12:01:00", "", "12:02:10")}},
			"12:05:29", "12:01:00!missed 12:02:00 next 15:00:00", []int64{7}},
		{"TheLastOfTheOldIsInTime", schedule.Due{Cron: "1 * * * * *", OnMissed: "skip", Begin: at("12:02:00"), Former: []schedule.Former{former(7, minutely, "12:01:00", "", "12:02:00")}},
			"12:02:02", "12:01:00!missed 12:02:00 12:02:01 next 12:03:01", []int64{7}},
		{"OneCapForAll", schedule.Due{Cron: half, OnMissed: "all", MissedCap: 3, Begin: at("12:02:10"), Former: []schedule.Former{former(7, minutely, "12:01:00", "", "12:02:10")}},
			"12:07:00", "12:01:00 12:02:00 12:02:30 12:03:30!capped 12:04:30!capped 12:05:30!capped 12:06:30 next 12:07:30", []int64{7}},
		{"OverlapCountsTheOldOnes", schedule.Due{Cron: half, OnMissed: "all", OnOverlap: "skip", Begin: at("12:02:10"), Former: []schedule.Former{former(7, minutely, "12:02:00", "", "12:02:10")}},
			"12:02:31", "12:02:00 12:02:30!overlap next 12:03:30", []int64{7}},
		{"QueueUpToItsCap", schedule.Due{Cron: minutely, OnMissed: "all", OnOverlap: "queue", QueueCap: 3, Waiting: 1, Next: at("12:01:00")},
			"12:04:10", "12:01:00 12:02:00 12:03:00!overlap 12:04:00!overlap next 12:05:00", nil},
		{"QueueCountsWhatIsMade", schedule.Due{Cron: minutely, OnMissed: "skip", OnOverlap: "queue", QueueCap: 1, Next: at("12:01:00")},
			"12:02:10", "12:01:00!missed 12:02:00 next 12:03:00", nil},
		{"QueueIsFull", schedule.Due{Cron: minutely, OnMissed: "one", OnOverlap: "queue", QueueCap: 3, Waiting: 3, Next: at("12:01:00")},
			"12:02:10", "12:01:00!missed 12:02:00!overlap next 12:03:00", nil},
		{"Disabled", schedule.Due{Cron: half, OnMissed: "all", Off: true, Begin: at("12:02:10"), Former: []schedule.Former{former(7, minutely, "12:01:00", "", "12:02:10")}},
			"12:04:00", "12:01:00 12:02:00", []int64{7}},
		{"Paused", schedule.Due{Cron: half, OnMissed: "all", Begin: at("12:00:10"), Paused: at("12:02:30")}, "12:02:20", "next 12:02:30", nil},
		{"AfterAPause", schedule.Due{Cron: half, OnMissed: "all", Begin: at("12:00:10"), Paused: at("12:02:10")}, "12:04:00", "12:02:30 12:03:30 next 12:04:30", nil},
		{"AnIntervalBeginsWithTheEndOfAPause", schedule.Due{Cron: "@every 1m", OnMissed: "all", Begin: at("12:00:10"), Paused: at("12:02:10")}, "12:02:20", "next 12:03:10", nil},
		{"AnIntervalBeginsWithTheEndOfAShortPause", schedule.Due{Cron: "@every 1m", OnMissed: "all", Begin: at("12:00:10"), Paused: at("12:00:40")}, "12:00:50", "next 12:01:40", nil},
		{"AnIntervalAfterAPause", schedule.Due{Cron: "@every 1m", OnMissed: "all", Begin: at("12:00:10"), Paused: at("12:00:10")}, "12:00:50", "next 12:01:10", nil},
		{"AnEditAfterAPause", schedule.Due{Cron: half, OnMissed: "all", Begin: at("12:03:10"), Paused: at("12:02:10")}, "12:03:20", "next 12:03:30", nil},
		{"WorkedOutAfterAPause", schedule.Due{Cron: half, OnMissed: "all", Next: at("12:02:30"), Paused: at("12:02:10")}, "12:02:40", "12:02:30 next 12:03:30", nil},
		{"ALineThatNobodyUnderstood", schedule.Due{Cron: half, OnMissed: "all", Begin: at("12:02:10"), Former: []schedule.Former{former(7, "99 * * * *", "", "12:01:00", "12:02:10")}},
			"12:02:31", "12:02:30 next 12:03:30", []int64{7}},
		{"NothingWasDue", schedule.Due{Cron: half, OnMissed: "all", Begin: at("12:02:10"), Former: []schedule.Former{former(7, minutely, "", "12:02:05", "12:02:10")}},
			"12:02:11", "next 12:02:30", []int64{7}},
	} {
		t.Run(test.name, func(t *testing.T) {
			s, err := schedule.Parse(test.d.Cron, "UTC")
			if err != nil {
				t.Fatal(err)
			}
			if test.d.MissedCap == 0 {
				test.d.MissedCap = 100
			}
			p := test.d.Plan(s, clock(t, test.now))
			if got := said(p); got != test.want {
				t.Errorf("got  %s\nwant %s", got, test.want)
			}
			if fmt.Sprint(p.Done) != fmt.Sprint(test.done) {
				t.Errorf("of %v nothing is left, want %v", p.Done, test.done)
			}
		})
	}

	// A clock that was set back into a pause, or to before it, is not its end.
	t.Run("Ahead", func(t *testing.T) {
		s, _ := schedule.Parse(half, "UTC")
		for now, want := range map[string]string{"12:00:10": "12:02:30", "12:02:20": "12:02:30", "12:05:00": "12:05:30"} {
			a := schedule.Ahead{Now: clock(t, now), Paused: at("12:02:10")}
			if got := a.From(s).Format(time.TimeOnly); got != want {
				t.Errorf("at %s the next one is %s, want %s", now, got, want)
			}
		}
	})

	t.Run("AheadOfAnInterval", func(t *testing.T) {
		s, _ := schedule.Parse("@every 1m", "UTC")
		for now, want := range map[string]string{"12:00:10": "12:03:10", "12:02:00": "12:03:10", "12:05:00": "12:06:00"} {
			a := schedule.Ahead{Now: clock(t, now), Paused: at("12:02:10")}
			if got := a.From(s).Format(time.TimeOnly); got != want {
				t.Errorf("at %s the next one is %s, want %s", now, got, want)
			}
		}
	})

	t.Run("UnknownZone", func(t *testing.T) {
		s, _ := schedule.Parse(half, "UTC")
		f := former(7, minutely, "12:01:00", "", "12:02:10")
		f.Zone = "Mars/Olympus_Mons"
		p := schedule.Due{OnMissed: "all", MissedCap: 9, Begin: at("12:02:10"), Former: []schedule.Former{f}}.Plan(s, clock(t, "12:02:31"))
		if got := said(p); got != "12:02:30 next 12:03:30" || len(p.Done) != 0 || fmt.Sprint(p.UnknownZones) != "[Mars/Olympus_Mons]" {
			t.Errorf("%s, done %v, unknown %v", got, p.Done, p.UnknownZones)
		}
	})

	// What does not fit into one plan is passed over up to the last due time before the edit.
	t.Run("MoreThanOnePlan", func(t *testing.T) {
		s, _ := schedule.Parse("@daily", "UTC")
		edit := clock(t, "12:00:00").AddDate(0, 0, 3)
		d := schedule.Due{OnMissed: "skip", Begin: &edit, Former: []schedule.Former{former(7, "* * * * * *", "12:00:01", "", "12:00:00"), former(8, "@hourly", "", "12:00:00", "12:00:00")}}
		d.Former[0].Until, d.Former[1].Begin, d.Former[1].Until = edit, edit, edit
		p := d.Plan(s, edit.Add(time.Hour))
		from := clock(t, "12:00:01").Add(100_000 * time.Second)
		if len(p.Occurrences) != 100_000 || p.Cut != 7 || !p.CutNext.Equal(edit) || len(p.Done) != 0 || !p.Keep || !p.More {
			t.Errorf("%d due times, cut %d at %v, done %v, keep %v, more %v", len(p.Occurrences), p.Cut, p.CutNext, p.Done, p.Keep, p.More)
		}
		if !p.PassedFrom.Equal(from) || !p.PassedTo.Equal(edit) {
			t.Errorf("passed over from %v to %v", p.PassedFrom, p.PassedTo)
		}
		d.Former[0].Next = &p.CutNext
		if p = d.Plan(s, edit.Add(time.Hour)); said(p) != "12:00:00!missed next 00:00:00" || fmt.Sprint(p.Done) != "[7 8]" || !p.PassedTo.IsZero() {
			t.Errorf("then %s, done %v, passed over to %v", said(p), p.Done, p.PassedTo)
		}
	})
}

// However many due times have passed, few are recorded, and the tasks are those that on_missed says. What
// is not recorded is named, and is all in one piece.
func TestPlansOfALongTime(t *testing.T) {
	t.Parallel()
	const most, missedCap = 100_000, 70
	lines := []string{"* * * * * *", "*/7 * * * * *", "@every 3s", "* * * 1 *", "* * * * * 1", "*/5 2 * * *", "0 * * * *", "@daily"}
	for seed := range uint64(2 * len(lines)) {
		random := rand.New(rand.NewPCG(seed, 0))
		line, zone := lines[seed%uint64(len(lines))], []string{"UTC", "Europe/Berlin"}[random.IntN(2)]
		s, err := schedule.Parse(line, zone)
		if err != nil {
			t.Fatal(err)
		}
		now := clock(t, "12:00:00").Add(time.Duration(random.Int64N(int64(365 * 24 * time.Hour))))
		next := s.Next(now.Add(-time.Duration(random.Float64() * random.Float64() * float64(60*365*24*time.Hour))).Truncate(time.Second))
		d := schedule.Due{OnMissed: []string{"skip", "one", "all"}[random.IntN(3)], MissedCap: missedCap, Next: &next}
		var made []schedule.Occurrence
		var from, to time.Time
		for plans := 0; ; plans++ {
			if random.IntN(2) == 0 {
				d.Most = 1 + random.IntN(2*most)
			}
			p := d.Plan(s, now)
			made = append(made, p.Occurrences...)
			if !p.PassedTo.IsZero() {
				if !to.IsZero() || !p.PassedFrom.Before(p.PassedTo) {
					t.Fatalf("seed %d: passed over from %v to %v, and from %v to %v", seed, from, to, p.PassedFrom, p.PassedTo)
				}
				from, to = p.PassedFrom, p.PassedTo
			}
			if d.Next, d.Part = &p.Next, p.Part; !p.More {
				break
			}
			if plans > 100 {
				t.Fatalf("seed %d: no end", seed)
			}
		}
		if len(made) == 0 || len(made) > most+1 || to.IsZero() == (len(made) == most+1) {
			t.Errorf("seed %d: %d due times are recorded, passed over up to %v", seed, len(made), to)
		}
		for i, o := range made {
			due := next
			if i > 0 {
				due = s.Next(made[i-1].Due)
			}
			if due.Equal(from) {
				due = to
			}
			if !o.Due.Equal(due) || o.Due.After(now) {
				t.Fatalf("seed %d: due time %d is %v, want %v", seed, i, o.Due, due)
			}
			last := i == len(made)-1
			if last && !s.Next(o.Due).After(now) {
				t.Errorf("seed %d: the last one is %v, at %v", seed, o.Due, now)
			}
			want := false
			switch inTime := last && now.Sub(o.Due) <= schedule.OnTime; d.OnMissed {
			case "skip":
				want = inTime
			case "one":
				want = last
			case "all":
				want = inTime || i < missedCap || i == most
			}
			if (o.Skipped == schedule.NotSkipped) != want {
				t.Errorf("seed %d: %s, due time %d of %d is skipped as %q", seed, d.OnMissed, i, len(made), o.Skipped)
			}
		}
	}
}

// A next due time that no leader has worked out is none: one from which on more have passed before the
// last edit, or before the last one that was made, than are recorded.
func TestNextDueTimeOfLongAgo(t *testing.T) {
	t.Parallel()
	now, long := clock(t, "12:00:00.5"), time.Unix(0, 0).UTC()
	for _, line := range []string{"* * * * * *", "@every 1s", "* * * * *"} {
		s, err := schedule.Parse(line, "UTC")
		if err != nil {
			t.Fatal(err)
		}
		begin := now.Add(-time.Minute)
		for name, d := range map[string]schedule.Due{
			"Next":   {OnMissed: "all", MissedCap: 100, Next: &long, Begin: &begin},
			"Former": {OnMissed: "all", MissedCap: 100, Off: true, Former: []schedule.Former{{ID: 7, Cron: line, Zone: "UTC", Next: &long, Begin: begin, Until: now}}},
		} {
			p := d.Plan(s, now)
			if n := len(p.Occurrences); n == 0 || n > 60 || !p.Occurrences[0].Due.Equal(s.Next(begin)) || p.More || !p.PassedTo.IsZero() {
				t.Errorf("%s of %s: %d due times, more %v, passed over to %v", name, line, n, p.More, p.PassedTo)
			}
		}
	}

	// One that a person has set back by hours counts.
	s, _ := schedule.Parse("* * * * * *", "UTC")
	begin, next := now, now.Add(-27*time.Hour).Truncate(time.Second)
	if p := (schedule.Due{OnMissed: "skip", Next: &next, Begin: &begin}).Plan(s, now); len(p.Occurrences) != 27*60*60+1 {
		t.Errorf("%d due times of 27 h", len(p.Occurrences))
	}
}

// Plans with a bound make together what one plan without it makes, whatever the bounds are.
func TestPlansWithABound(t *testing.T) {
	t.Parallel()
	start := clock(t, "12:00:00")
	lines := []string{"* * * * * *", "*/7 * * * * *", "* * * * *", "@every 11s", "99 * * * *"}
	for seed := range uint64(500) {
		random := rand.New(rand.NewPCG(seed, 0))
		at := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
		line := lines[random.IntN(len(lines)-1)]
		s, err := schedule.Parse(line, "UTC")
		if err != nil {
			t.Fatal(err)
		}
		d := schedule.Due{
			OnMissed: []string{"skip", "one", "all"}[random.IntN(3)], MissedCap: 1 + random.IntN(150),
			OnOverlap: []string{"allow", "queue"}[random.IntN(2)], QueueCap: 1000, Off: random.IntN(5) == 0,
		}
		begin := 0
		for id := range int64(random.IntN(4)) {
			until := begin + random.IntN(120)
			d.Former = append(d.Former, schedule.Former{ID: id + 1, Cron: lines[random.IntN(len(lines))], Zone: "UTC", Begin: at(begin), Until: at(until)})
			begin = until
		}
		edit, now := at(begin), at(begin+random.IntN(200)).Add(time.Duration(random.IntN(1e9)))
		d.Begin = &edit
		want := d.Plan(s, now)
		got := schedule.Plan{Keep: d.Off}
		for plans := 0; ; plans++ {
			d.Most = 1 + random.IntN(100)
			p := d.Plan(s, now)
			if len(p.Occurrences) > d.Most || p.More && len(p.Occurrences) < d.Most || plans > 1000 {
				t.Fatalf("seed %d: %d due times of at most %d", seed, len(p.Occurrences), d.Most)
			}
			got.Occurrences, got.Done, got.Next = append(got.Occurrences, p.Occurrences...), append(got.Done, p.Done...), p.Next
			if d.Part = p.Part; !p.More {
				break
			}
			d.Former = slices.DeleteFunc(d.Former, func(f schedule.Former) bool { return slices.Contains(p.Done, f.ID) })
			if p.Cut != 0 {
				d.Former[0].Next = &p.CutNext
			}
			if !p.Keep {
				d.Next = &p.Next
			}
		}
		if got.Keep = d.Off; said(got) != said(want) || fmt.Sprint(got.Done) != fmt.Sprint(want.Done) {
			t.Fatalf("seed %d: got  %s, done %v\nwant %s, done %v", seed, said(got), got.Done, said(want), want.Done)
		}
		if d.Part != (schedule.Part{}) || want.Part != d.Part {
			t.Errorf("seed %d: at the end there is %v, and %v", seed, d.Part, want.Part)
		}
	}

	// What fits into one plan is the same with a bound.
	t.Run("ManyDueTimes", func(t *testing.T) {
		s, _ := schedule.Parse("* * * * * *", "UTC")
		now := start.AddDate(0, 0, 2)
		capped := func(most int) (tasks int) {
			next := start
			d := schedule.Due{OnMissed: "all", MissedCap: 500, Next: &next, Most: most}
			for {
				p := d.Plan(s, now)
				for _, o := range p.Occurrences {
					if o.Skipped == schedule.NotSkipped {
						tasks++
					}
				}
				if d.Next, d.Part = &p.Next, p.Part; !p.More {
					return tasks
				}
			}
		}
		if got, want := capped(999), capped(0); got != want || want != 501 {
			t.Errorf("%d tasks, and %d with one plan", got, want)
		}
	})
}

// A next due time that was worked out by other rules of the zone than those of this process is
// replaced by the one that is meant, which is made once.
func TestPlanAfterAChangeOfZoneRules(t *testing.T) {
	t.Parallel()
	at := func(text string) *time.Time { c := clock(t, text); return &c }
	yesterday := func(text string) *time.Time { c := clock(t, text).AddDate(0, 0, -1); return &c }
	const daily, berlin = "0 13 * * *", "Europe/Berlin" // 11:00 in UTC
	for _, test := range []struct {
		name       string
		cron, zone string
		d          schedule.Due
		now        string
		want       string
	}{
		{"AsBefore", daily, berlin, schedule.Due{OnMissed: "all", Next: at("11:00:00"), Begin: yesterday("11:00:00")}, "11:00:10", "11:00:00 next 11:00:00"},
		{"ItIsLater", daily, berlin, schedule.Due{OnMissed: "all", Next: at("10:00:00"), Begin: yesterday("10:00:00")}, "10:00:10", "next 11:00:00"},
		{"ItWasEarlier", daily, berlin, schedule.Due{OnMissed: "all", Next: at("12:00:00"), Begin: yesterday("12:00:00")}, "12:00:10", "11:00:00 next 11:00:00"},
		{"ItWasEarlierAndIsMade", daily, berlin, schedule.Due{OnMissed: "all", Next: at("12:00:00"), Begin: at("11:00:00")}, "12:00:10", "next 11:00:00"},
		{"ItWasBeforeAnEdit", daily, berlin, schedule.Due{OnMissed: "all", Next: at("12:00:00"), Begin: at("11:30:00")}, "12:00:10", "next 11:00:00"},
		{"ItWasInAPause", daily, berlin, schedule.Due{OnMissed: "all", Next: at("12:00:00"), Begin: at("10:00:00"), Paused: at("11:30:00")}, "12:00:10", "next 11:00:00"},
		{"NoEditIsKnown", daily, berlin, schedule.Due{OnMissed: "all", Next: at("10:00:00")}, "10:00:10", "next 11:00:00"},
		{"OneIsAsNearAsTheOther", "30 * * * *", "UTC", schedule.Due{OnMissed: "all", Next: at("12:00:00"), Begin: at("11:00:00")}, "12:00:10", "11:30:00 next 12:30:00"},
		{"OfEverySecond", "* * * * * *", "UTC", schedule.Due{OnMissed: "skip", Next: at("12:00:00.9"), Begin: at("11:00:00")}, "12:00:01.9", "12:00:01 next 12:00:02"},
		{"OfAMonthLongAgo", "* * * 1 *", "UTC", schedule.Due{OnMissed: "all", Next: at("12:00:00.5"), Begin: yesterday("11:00:00")}, "12:00:10", "next 00:00:00"},
		{"AnIntervalHasNone", "@every 1m", berlin, schedule.Due{OnMissed: "all", Next: at("12:00:07"), Begin: at("11:00:00")}, "12:00:10", "12:00:07 next 12:01:07"},
		{"ALineThatNeverComesDue", "0 0 30 2 *", berlin, schedule.Due{OnMissed: "all", Next: at("12:00:00"), Begin: at("11:00:00")}, "12:00:10", "next 00:00:00"},
		{"OfALineBeforeAnEdit", "@every 1h", "UTC", schedule.Due{OnMissed: "all", Begin: at("11:30:00"),
			Former: []schedule.Former{{ID: 7, Cron: daily, Zone: berlin, Next: at("10:00:00"), Begin: *yesterday("10:00:00"), Until: *at("11:30:00")}}}, "11:40:00", "11:00:00 next 12:30:00"},
		{"NotDueBeforeAnEdit", "@every 1h", "UTC", schedule.Due{OnMissed: "all", Begin: at("10:30:00"),
			Former: []schedule.Former{{ID: 7, Cron: daily, Zone: berlin, Next: at("10:00:00"), Begin: *yesterday("10:00:00"), Until: *at("10:30:00")}}}, "10:40:00", "next 11:30:00"},
	} {
		t.Run(test.name, func(t *testing.T) {
			s, err := schedule.Parse(test.cron, test.zone)
			if err != nil {
				t.Fatal(err)
			}
			test.d.MissedCap = 100
			p := test.d.Plan(s, clock(t, test.now))
			p.Next = p.Next.UTC()
			for i := range p.Occurrences {
				p.Occurrences[i].Due = p.Occurrences[i].Due.UTC()
			}
			if got := said(p); got != test.want {
				t.Errorf("got  %s\nwant %s", got, test.want)
			}
		})
	}
}
