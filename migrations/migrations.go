// Package migrations holds the schema of onejob, as numbered SQL files.
package migrations

import "embed"

// Files holds the migrations. A file that has been released is never changed:
// what is wrong in it is mended by the next one.
//
//go:embed *.sql
var Files embed.FS
