// Package sql is the kind of tasks that run statements in the database of the tasks.
// Its usual import name is sqlkind.
package sql

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"onejob/internal/payload"
	"onejob/internal/pgerror"
	"onejob/tasks"
)

// Kind runs statements that the configuration names, with parameters from the
// payload:
//
//	{"statement": "close_month", "params": {"month": "2026-10-01"}}
//
// The statement's effect and the task's success commit in one transaction under
// the fence: each task takes effect exactly once, and a stale replica changes
// nothing. It runs in the database of the tasks, as onejob's user there.
type Kind struct {
	statements map[string]Statement
	store      Committer
}

// Config is what a [Kind] may do.
type Config struct {
	Statements map[string]Statement `yaml:"statements"` // by the names that payloads choose
}

// Statement is one statement that rows may ask for.
type Statement struct {
	// SQL is a single statement with $1, $2 and so on for parameters. It must not
	// begin or end a transaction. It can read the settings onejob.task_id, onejob.attempt, onejob.fence and
	// onejob.lock_key with current_setting.
	SQL string `yaml:"sql"`

	// Params names the payload's parameters in the order of $1, $2 and so on.
	// Each is given to Postgres as text, to be read as the type that the
	// statement wants there; a JSON null is a NULL.
	Params []string `yaml:"params"`
}

// Committer commits what fn does together with the success of the task, or
// neither. It returns tasks.ErrRefused if the fence has been superseded.
type Committer interface {
	CompleteWith(ctx context.Context, t *tasks.Task, fn func(ctx context.Context, tx pgx.Tx) (json.RawMessage, error)) error
}

// Room returns how many statements could begin now, and whether that is fewer than there seem to be: then
// a replica claims no more than these.
func (k *Kind) Room() (n int, scarce bool) {
	if s, ok := k.store.(interface{ StatementRoom() (n int, scarce bool) }); ok {
		return s.StatementRoom()
	}
	return 0, false
}

// New returns a Kind that completes its tasks in store, or an error that names
// everything that is wrong with the configuration.
func New(c Config, store Committer) (*Kind, error) {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(c.Statements)) {
		if strings.ContainsFunc(name, unicode.IsControl) {
			errs = append(errs, fmt.Errorf("statement %q: a name may hold no control characters", name))
		}
		switch word := firstWord(c.Statements[name].SQL); word {
		case "":
			errs = append(errs, fmt.Errorf("statement %q has no sql", name))
		case "ABORT", "BEGIN", "COMMIT", "END", "PREPARE", "RELEASE", "ROLLBACK", "SAVEPOINT", "START":
			errs = append(errs, fmt.Errorf("statement %q begins with %s: it runs in the transaction that completes the task and must not control it", name, word))
		case "COPY":
			if copiesHere.MatchString(apart.ReplaceAllString(c.Statements[name].SQL, " ")) {
				errs = append(errs, fmt.Errorf("statement %q copies from or to the client, which has no data and takes none: use INSERT, or COPY with a file of the server", name))
			}
		}
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return &Kind{maps.Clone(c.Statements), store}, nil
}

// copiesHere finds a COPY for whose data Postgres waits, or which throws them away, once strings and
// comments are left out.
var (
	copiesHere = regexp.MustCompile(`(?i)\b(from\s+stdin|to\s+stdout)\b`)
	apart      = regexp.MustCompile(`(?s)'[^']*'|--[^\n]*|/\*.*?\*/`)
)

// firstWord returns the first word of a statement in capitals, after white space,
// comments and parentheses; "" if there is nothing.
func firstWord(sql string) string {
	for {
		sql = strings.TrimLeft(sql, " \t\r\n\f\v(;")
		switch {
		case strings.HasPrefix(sql, "--"):
			_, sql, _ = strings.Cut(sql, "\n")
		case strings.HasPrefix(sql, "/*"):
			_, sql, _ = strings.Cut(sql, "*/")
		default:
			word := sql
			if i := strings.IndexFunc(sql, func(r rune) bool { return r != '_' && !unicode.IsLetter(r) && !unicode.IsDigit(r) }); i > 0 {
				word = sql[:i]
			}
			return strings.ToUpper(word)
		}
	}
}

// Names returns the names of the statements.
func (k *Kind) Names() (field string, names []string) {
	return "statement", slices.Sorted(maps.Keys(k.statements))
}

// Prepare refuses a payload that names no statement, that has unknown fields, or
// whose parameters are not the statement's. A statement that is not configured
// here is a [tasks.ErrUnknown].
func (k *Kind) Prepare(raw json.RawMessage) (tasks.Handler, error) {
	var p struct {
		Statement string                     `json:"statement"`
		Params    map[string]json.RawMessage `json:"params"`
	}
	if err := payload.CheckFields(raw, "statement", "params"); err != nil {
		return nil, err
	}
	if err := payload.Unmarshal(raw, &p); err != nil {
		return nil, fmt.Errorf(`%w; write {"statement": NAME, "params": {...}}`, err)
	}
	if p.Statement == "" {
		return nil, errors.New(`payload: it names no statement; write {"statement": NAME, "params": {...}}`)
	}
	s, ok := k.statements[p.Statement]
	if !ok {
		return nil, &tasks.UnknownError{Name: p.Statement, Err: fmt.Errorf("payload: statement %.100q is not in the configuration (kinds.sql.statements), which has %q", p.Statement, slices.Sorted(maps.Keys(k.statements)))}
	}
	args := make([]any, len(s.Params))
	for i, name := range s.Params {
		value, ok := p.Params[name]
		if !ok {
			return nil, fmt.Errorf("payload: statement %q needs the parameter %q", p.Statement, name)
		}
		args[i] = text(value)
	}
	for name := range p.Params {
		if !slices.Contains(s.Params, name) {
			return nil, fmt.Errorf("payload: statement %q has no parameter %q; it has %q", p.Statement, name, s.Params)
		}
	}
	return execution{k.store, s.SQL, args}.run, nil
}

// text returns a JSON value as Postgres reads it from text.
func text(raw json.RawMessage) any {
	var s *string
	if json.Unmarshal(raw, &s) != nil {
		return string(raw) // a number, true, false, an object or an array
	}
	if s == nil {
		return nil
	}
	return *s
}

// execution is a statement with the parameters of a payload.
type execution struct {
	store Committer
	sql   string
	args  []any
}

// run runs the statement and commits. The task fails for good if Postgres cannot
// read data as the type it wants (SQLSTATE class 22), if the statement is not a
// single one that it can parse, if it has more or fewer parameters than the
// configuration names, and if it ends its transaction.
//
// An error whose cause is the database or the way to it uses up no attempt. Nothing
// of the statement was kept then, or the commit was not answered; in that case the
// fence decides when the task is requeued. But if the connection breaks under the statement again and
// again, the statement may be the cause, and attempts are used up.
func (e execution) run(ctx context.Context, a *tasks.Attempt) (tasks.Result, error) {
	var own error // of the statement itself
	err := e.store.CompleteWith(ctx, &a.Task, func(ctx context.Context, tx pgx.Tx) (json.RawMessage, error) {
		var n int64
		if n, own = execOne(ctx, tx, e.sql, e.args); own != nil {
			return nil, own
		}
		// Deferred triggers belong to the statement: at the commit they would run without its search_path
		// and settings.
		if _, own = tx.Exec(ctx, "SET CONSTRAINTS ALL IMMEDIATE"); own != nil {
			return nil, own
		}
		return json.RawMessage(fmt.Sprintf(`{"rows": %d}`, n)), nil
	})
	var broken interface{ Broken() int }
	switch {
	case err == nil:
		return tasks.Result{Committed: true}, nil
	case ctx.Err() != nil:
		return tasks.Result{}, err
	case errors.As(err, &broken):
		n := broken.Broken()
		if n < maxBroken {
			return tasks.Result{}, tasks.Requeue(requeueOwnAfter<<n, err)
		}
		return tasks.Result{}, fmt.Errorf("as %d times before, %w", n, err)
	case pgerror.Unavailable(err) && !(own != nil && ofStatement(err)):
		d := requeueAfter
		if own != nil {
			d = requeueOwnAfter
		}
		return tasks.Result{}, tasks.Requeue(d, err)
	}
	pg, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return tasks.Result{}, err
	}
	here := own != nil && !relayed(pg) // another server may accept it next time
	switch {
	case here && pg.Code == "08P01" && pg.Routine == "exec_bind_message":
		err = tasks.Permanent(fmt.Errorf("%w; params in the configuration must have one name for each of $1, $2 and so on", err))
	case here && pg.Code == "42601": // syntax_error; several statements are one, too
		err = tasks.Permanent(fmt.Errorf("%w; a statement must be a single one", err))
	case here && (strings.HasPrefix(pg.Code, "2D") || strings.HasPrefix(pg.Code, "25")): // COMMIT in a procedure; SET TRANSACTION
		err = tasks.Permanent(fmt.Errorf("%w; it runs in the transaction that completes the task and must not end or change it", err))
	case here && strings.HasPrefix(pg.Code, "22"):
		err = tasks.Permanent(err)
	}
	return tasks.Result{}, err
}

// execOne runs a single statement by the extended protocol, which takes no more than
// one, and returns how many rows it affected. Postgres parses it each time: a plan
// that it kept would fail when somebody alters a table.
func execOne(ctx context.Context, tx pgx.Tx, sql string, args []any) (int64, error) {
	rows, err := tx.Query(ctx, sql, append([]any{pgx.QueryExecModeExec}, args...)...)
	if err != nil {
		return 0, err
	}
	rows.Close()
	return rows.CommandTag().RowsAffected(), rows.Err()
}

// ofStatement reports whether an error as of an unavailable database is about the user's statement
// after all: the server that gives it lives on. It may be another server that is unavailable, which the
// statement asks (postgres_fdw, dblink), or memory that the statement alone needs.
//
// No transaction of a statement begins as a read-only one: if it is read-only, the statement made it so.
//
// The statement is not prepared: if that fails so, it said EXECUTE or PREPARE itself.
func ofStatement(err error) bool {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || pg.SeverityUnlocalized != "ERROR" {
		return false
	}
	switch pg.Code {
	case "53100", "25P03", "25P04": // a full disk, too slow
		return relayed(pg)
	}
	return true
}

// relayed reports whether an error is what another server has said to postgres_fdw or dblink, by the
// function of theirs that raises it.
func relayed(pg *pgconn.PgError) bool {
	return strings.HasPrefix(pg.Routine, "pgfdw_report") || pg.Routine == "dblink_res_error"
}

// How long a task waits when the database was unavailable. It waits longer if its own statement was at
// work, and twice as long each time that the connection broke under it: should the statement be what
// takes the server down, it does not do so every second. After maxBroken such times each one uses up an
// attempt.
const (
	requeueAfter    = time.Second
	requeueOwnAfter = 5 * time.Second
	maxBroken       = 3
)
