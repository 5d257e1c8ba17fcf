package plaintext

var Narrow = narrow
