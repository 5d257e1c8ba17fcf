package store

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"onejob/boottime"
	"onejob/tasks"
)

// TestAllocationsOfACompletion bounds what the arguments of a statement of completions
// allocate, as they are made and as pgx encodes them: less than one object for each
// completion. As values of any, the elements of the arrays were 9 objects.
func TestAllocationsOfACompletion(t *testing.T) {
	const together, most = 256, 0.5
	list := make([]*completion, together)
	for i := range list {
		list[i] = &completion{Completion: tasks.Completion{ID: 1_000_000 + int64(i), Fence: 2_000_000 + int64(i), Session: "0f9b2c1e-6a5d-4c38-9e7f-1b2a3c4d5e6f",
			Outcome: tasks.Succeeded, Next: tasks.StatusSucceeded, Begun: boottime.Now(), StoppedAt: time.Now()}}
	}
	types := pgtype.NewMap()
	registerColumns(types)
	statement := &pgconn.StatementDescription{ParamOIDs: []uint32{
		pgtype.Int8ArrayOID, pgtype.Int8ArrayOID, pgtype.UUIDArrayOID, pgtype.TextArrayOID, pgtype.TextArrayOID, pgtype.Int8ArrayOID, pgtype.BoolArrayOID, pgtype.BoolArrayOID,
		pgtype.Int8ArrayOID, pgtype.TimestamptzArrayOID, pgtype.TextArrayOID, pgtype.Int4ArrayOID, pgtype.TextArrayOID, pgtype.TextArrayOID}}
	got := testing.AllocsPerRun(20, func() {
		_, args, err := arguments(list).RewriteQuery(t.Context(), nil, completeSQL, nil)
		if err != nil {
			t.Fatal(err)
		}
		var build pgx.ExtendedQueryBuilder
		if err := build.Build(types, statement, args); err != nil {
			t.Fatal(err)
		}
	}) / together
	t.Logf("%.2f objects", got)
	if got > most {
		t.Errorf("a completion allocates %.1f objects, more than %.1f: do its arguments have a type of column?", got, most)
	}
}

// TestColumns encodes columns of all types, as for a server that was asked for the types of a
// statement and as for one that was not.
func TestColumns(t *testing.T) {
	types := pgtype.NewMap()
	registerColumns(types)
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, test := range []struct {
		oid      uint32
		ours, as any
	}{
		{pgtype.BoolArrayOID, column[pgtype.Bool]{{Bool: true, Valid: true}, {}}, []pgtype.Bool{{Bool: true, Valid: true}, {}}},
		{pgtype.Int4ArrayOID, column[pgtype.Int4]{{Int32: 7, Valid: true}, {}}, []pgtype.Int4{{Int32: 7, Valid: true}, {}}},
		{pgtype.Int8ArrayOID, column[pgtype.Int8]{integer(7), {}}, []pgtype.Int8{integer(7), {}}},
		{pgtype.TextArrayOID, column[pgtype.Text]{text(`a"\,b`), text(""), {}}, []pgtype.Text{text(`a"\,b`), text(""), {}}},
		{pgtype.TimestamptzArrayOID, column[pgtype.Timestamptz]{{Time: at, Valid: true}, {}}, []pgtype.Timestamptz{{Time: at, Valid: true}, {}}},
		{pgtype.UUIDArrayOID, column[pgtype.UUID]{{Bytes: [16]byte{1}, Valid: true}, {}}, []pgtype.UUID{{Bytes: [16]byte{1}, Valid: true}, {}}},
		{pgtype.Int8ArrayOID, column[pgtype.Int8]{}, []pgtype.Int8{}},
	} {
		for _, oid := range []uint32{test.oid, 0} {
			for _, format := range []int16{pgtype.TextFormatCode, pgtype.BinaryFormatCode} {
				got, err := types.Encode(oid, format, test.ours, nil)
				want, wantErr := types.Encode(oid, format, test.as, nil)
				if err != nil || wantErr != nil || string(got) != string(want) {
					t.Errorf("%T of type %d in format %d is %q, %v; want %q, %v", test.ours, oid, format, got, err, want, wantErr)
				}
			}
		}
	}
}
