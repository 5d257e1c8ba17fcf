package store

import (
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// A column is an array as an argument of a statement. pgx takes elements as any, and a
// column gives it their addresses: as values each of them would be allocated, and some twice.
type column[T any] []T

// Dimensions implements pgtype.ArrayGetter.
func (c column[T]) Dimensions() []pgtype.ArrayDimension {
	return []pgtype.ArrayDimension{{Length: int32(len(c)), LowerBound: 1}}
}

// Index implements pgtype.ArrayGetter.
func (c column[T]) Index(i int) any { return &c[i] }

// IndexType implements pgtype.ArrayGetter.
func (c column[T]) IndexType() any { return new(T) }

// registerColumns tells pgx of which types columns are where Postgres has not been asked,
// as behind a pooler.
func registerColumns(types *pgtype.Map) {
	types.RegisterDefaultPgType(column[pgtype.Bool]{}, "_bool")
	types.RegisterDefaultPgType(column[pgtype.Int4]{}, "_int4")
	types.RegisterDefaultPgType(column[pgtype.Int8]{}, "_int8")
	types.RegisterDefaultPgType(column[pgtype.Text]{}, "_text")
	types.RegisterDefaultPgType(column[pgtype.Timestamptz]{}, "_timestamptz")
	types.RegisterDefaultPgType(column[pgtype.UUID]{}, "_uuid")
}

// rowTo returns a function that scans rows of one column, each into the same variable.
func rowTo[T any]() pgx.RowToFunc[T] {
	var value T
	into := []any{&value}
	return func(row pgx.CollectableRow) (T, error) {
		err := row.Scan(into...)
		return value, err
	}
}

// A repeated string is scanned from rows of which most have the same one as the row before.
type repeated string

// ScanBytes implements pgtype.BytesScanner.
func (s *repeated) ScanBytes(v []byte) error {
	if string(*s) != string(v) {
		*s = repeated(v)
	}
	return nil
}
