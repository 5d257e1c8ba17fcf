package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/tasks"
)

// What people ask for, at the command line.

// ErrNoTask says that there is no task with that id.
var ErrNoTask = errors.New("there is no such task")

// Row is a task as people see it.
type Row struct {
	ID              int64           `json:"id" db:"id"`
	Kind            string          `json:"kind" db:"kind"`
	Payload         json.RawMessage `json:"payload" db:"payload"` // a JSON string with the text of it, if it is too deep for a JSON value, see readable
	Status          string          `json:"status" db:"status"`
	Queue           string          `json:"queue" db:"queue"`
	Priority        int16           `json:"priority" db:"priority"`
	RunAt           Time            `json:"run_at" db:"run_at"`
	LockKey         *string         `json:"lock_key" db:"lock_key"`
	LimitName       *string         `json:"limit_name" db:"limit_name"`
	UniqueKey       *string         `json:"unique_key" db:"unique_key"`
	Attempt         int             `json:"attempt" db:"attempt"`
	MaxAttempts     int             `json:"max_attempts" db:"max_attempts"`
	Crashes         int             `json:"crashes" db:"crashes"`
	Stalls          int             `json:"stalls" db:"stalls"`
	Timeout         *string         `json:"timeout" db:"timeout"`
	Fence           *int64          `json:"fence" db:"fence"`
	Session         *string         `json:"session" db:"session"`
	Replica         *string         `json:"replica" db:"replica"`
	StartedAt       *Time           `json:"started_at" db:"started_at"`
	FinishedAt      *Time           `json:"finished_at" db:"finished_at"`
	Result          json.RawMessage `json:"result" db:"result"`
	Error           *string         `json:"error" db:"error"`
	CancelRequested bool            `json:"cancel_requested" db:"cancel_requested"`
	Progress        *TaskProgress   `json:"progress" db:"progress"` // nil if it does not run, or has said nothing
	Schedule        *string         `json:"schedule" db:"schedule"` // the name of the one that made it; nil if none did, or it is deleted
	KeepFor         *string         `json:"keep_for" db:"keep_for"`
	Traceparent     *string         `json:"traceparent" db:"traceparent"`
	CreatedAt       Time            `json:"created_at" db:"created_at"`
}

const rowColumns = `id, kind, payload::text AS payload, status, queue, priority, run_at, lock_key, limit_name, unique_key, attempt, max_attempts, crashes, stalls,
       timeout::text, fence, session::text, replica, started_at, finished_at, result::text AS result, error, cancel_requested, ` + progressColumn + `,
       (SELECT name FROM onejob.schedules s WHERE s.id = schedule_id) AS schedule, keep_for::text, traceparent, created_at`

// makeReadable lets JSON be made of r, whatever a person has written into the row.
func (r *Row) makeReadable() {
	r.Payload, r.Result = readable(r.Payload), readable(r.Result)
}

// deepest is how deep JSON may be nested that is shown as it is. encoding/json neither reads nor
// writes what is deeper than 10,000, of which the lists around it need some; Postgres takes more.
const deepest = 9_900

// readable returns JSON of Postgres that is nested too deep as a JSON string, and all other as it is.
// The columns are read as text: pgx would have encoding/json check them, and one row would keep
// the others of a list from being read.
func readable(text json.RawMessage) json.RawMessage {
	depth := 0
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '"':
			for i++; i < len(text) && text[i] != '"'; i++ {
				if text[i] == '\\' {
					i++
				}
			}
		case '[', '{':
			if depth++; depth > deepest {
				quoted, _ := json.Marshal(string(text)) // a string can always be encoded
				return quoted
			}
		case ']', '}':
			depth--
		}
	}
	return text
}

// TaskProgress is what a running task has said of how far it is.
type TaskProgress struct {
	Percent *float64  `json:"percent"` // nil if it does not know
	Text    string    `json:"text"`
	SaidAt  time.Time `json:"said_at"`
}

// UnmarshalJSON leaves the value empty if it cannot be read, and has no error: what somebody
// wrote into the column by hand must not keep whole lists from being shown.
func (p *TaskProgress) UnmarshalJSON(b []byte) error {
	type plain TaskProgress
	if json.Unmarshal(b, (*plain)(p)) != nil {
		*p = TaskProgress{}
	}
	return nil
}

// String returns the percentage, the text or both.
func (p TaskProgress) String() string {
	switch {
	case p.Percent == nil:
		return p.Text
	case p.Text == "":
		return fmt.Sprintf("%.4g %%", *p.Percent)
	}
	return fmt.Sprintf("%.4g %%, %s", *p.Percent, p.Text)
}

// progressColumn reads what onejob.progress shows, at less cost.
const progressColumn = `CASE WHEN status = 'running' THEN (SELECT r.progress -> fence::text FROM onejob.replicas r WHERE r.session = tasks.session) END AS progress`

// AttemptRow is an attempt as people see it. What is not known of a refused one
// is empty.
type AttemptRow struct {
	Fence      int64   `json:"fence" db:"fence"`
	Attempt    int     `json:"attempt" db:"attempt"`
	Replica    string  `json:"replica" db:"replica"`
	Session    string  `json:"session" db:"session"`
	StartedAt  Time    `json:"started_at" db:"started_at"`
	FinishedAt Time    `json:"finished_at" db:"finished_at"`
	Outcome    string  `json:"outcome" db:"outcome"`
	Error      *string `json:"error" db:"error"`
	ExitCode   *int    `json:"exit_code" db:"exit_code"`
	Output     *string `json:"output" db:"output"`
}

// Status returns a task's status, and its error if it has one, or ErrNoTask.
func (s *Store) Status(ctx context.Context, id int64) (status tasks.Status, message string, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	err = s.pool.QueryRow(ctx, `SELECT status, coalesce(error, '') FROM onejob.tasks WHERE id = $1`, id).Scan(&status, &message)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", "", fmt.Errorf("task %d: %w", id, ErrNoTask)
	}
	if err != nil {
		return "", "", fmt.Errorf("look at task %d: %w", id, err)
	}
	return status, message, nil
}

// Unended returns the ID of the pending or running task with a unique key, or zero if there is none.
func (s *Store) Unended(ctx context.Context, uniqueKey string) (int64, error) {
	ids, err := fetch(ctx, s.pool, fmt.Sprintf("look for the task with the unique key %q", uniqueKey), pgx.RowTo[int64], `SELECT id FROM onejob.tasks WHERE unique_key = $1 AND status IN ('pending', 'running')`, uniqueKey)
	if err != nil || len(ids) == 0 {
		return 0, err
	}
	return ids[0], nil
}

// MostAttempts is how many attempts Show returns at most. A task that is requeued, which uses up none
// of its attempts, may have any number.
const MostAttempts = 1000

// Show returns one task and its last attempts, the oldest first, or ErrNoTask.
func (s *Store) Show(ctx context.Context, id int64) (Row, []AttemptRow, error) {
	row, err := s.Row(ctx, id)
	if err != nil {
		return Row{}, nil, err
	}
	attempts, err := s.Attempts(ctx, id, MostAttempts)
	if err != nil {
		return Row{}, nil, err
	}
	return row, attempts, nil
}

// Row returns one task, or ErrNoTask.
func (s *Store) Row(ctx context.Context, id int64) (Row, error) {
	rows, err := fetchFreely(ctx, s.pool, showing(id), pgx.RowToStructByName[Row], `SELECT `+rowColumns+` FROM onejob.tasks WHERE id = $1`, id)
	if err != nil {
		return Row{}, err
	}
	if len(rows) == 0 {
		return Row{}, fmt.Errorf("task %d: %w", id, ErrNoTask)
	}
	rows[0].makeReadable()
	return rows[0], nil
}

// Attempts returns the last attempts of a task that have ended, at most limit of them, the oldest
// first. Each comes with its output, which may be long.
func (s *Store) Attempts(ctx context.Context, id int64, limit int) ([]AttemptRow, error) {
	attempts, err := fetchFreely(ctx, s.pool, showing(id), pgx.RowToStructByName[AttemptRow], `
SELECT fence, coalesce(attempt, 0) AS attempt, coalesce(replica, '') AS replica, coalesce(session::text, '') AS session,
       coalesce(started_at, finished_at) AS started_at, finished_at, outcome, error, exit_code, output
  FROM onejob.attempts
 WHERE task_id = $1
 ORDER BY fence DESC
 LIMIT $2`, id, limit)
	slices.Reverse(attempts)
	return attempts, err
}

func showing(id int64) string { return fmt.Sprintf("show task %d", id) }

// Cancel cancels a waiting task now and a running one soon. It reports whether
// there was anything to cancel.
func (s *Store) Cancel(ctx context.Context, id int64) (bool, error) {
	return s.ask(ctx, `SELECT onejob.cancel(@id::bigint)`, id)
}

// Retry makes a task that is not running due now, with all its attempts. It
// reports whether there was such a task.
func (s *Store) Retry(ctx context.Context, id int64) (bool, error) {
	return s.ask(ctx, `SELECT onejob.retry(@id::bigint)`, id)
}

func (s *Store) ask(ctx context.Context, sql string, id int64) (bool, error) {
	return one(act[bool](ctx, s, fmt.Sprintf("task %d", id), sql, namedArgs{"id": id}))
}
