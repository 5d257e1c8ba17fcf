package tracing

var Options = options
