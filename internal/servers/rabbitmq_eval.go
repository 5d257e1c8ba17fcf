package servers

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
)

// evaluator is what Eval starts in a broker: it listens on a socket in the broker's own folder, and
// evaluates one text for each connection.
const evaluator = `
	Listening = self(),
	Evaluate = fun(Socket) ->
		{ok, Text} = gen_tcp:recv(Socket, 0),
		Answer = try
			{ok, Tokens, _} = erl_scan:string(binary_to_list(Text)),
			{ok, Expressions} = erl_parse:parse_exprs(Tokens),
			{value, Value, _} = erl_eval:exprs(Expressions, erl_eval:new_bindings()),
			io_lib:format("ok ~0p", [Value])
		catch Class:Reason -> io_lib:format("~p: ~0p", [Class, Reason]) end,
		gen_tcp:send(Socket, unicode:characters_to_binary(Answer)),
		gen_tcp:close(Socket)
	end,
	spawn(fun() ->
		group_leader(whereis(init), self()),
		file:delete("%[1]s"),
		{ok, Listener} = gen_tcp:listen(0, [{ifaddr, {local, "%[1]s"}}, binary, {packet, 4}, {active, false}]),
		Listening ! listening,
		Accept = fun Next() ->
			{ok, Socket} = gen_tcp:accept(Listener),
			One = spawn(fun() -> receive yours -> Evaluate(Socket) end end),
			ok = gen_tcp:controlling_process(Socket, One),
			One ! yours,
			Next()
		end,
		Accept()
	end),
	receive listening -> ok after 10000 -> exit(timeout) end.`

// Eval evaluates Erlang expressions in the broker, and returns the value of the last one as Erlang
// prints it, on one line. The first call after a start of the broker takes as long as Ctl, the others
// milliseconds. If ctx ends first the expressions go on.
func (r *RabbitMQ) Eval(ctx context.Context, expressions string) (string, error) {
	r.evaluating.Lock()
	conn, err := net.Dial("unix", r.file("eval"))
	if err != nil {
		if _, err = r.Ctl(ctx, "eval", fmt.Sprintf(evaluator, r.file("eval"))); err == nil {
			conn, err = net.Dial("unix", r.file("eval"))
		}
	}
	r.evaluating.Unlock()
	if err != nil {
		return "", fmt.Errorf("start an evaluator in RabbitMQ: %w", err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	question := binary.BigEndian.AppendUint32(nil, uint32(len(expressions)))
	_, err = conn.Write(append(question, expressions...))
	var answer []byte
	if err == nil {
		answer, err = io.ReadAll(conn)
	}
	switch {
	case err != nil:
	case len(answer) < 4:
		err = errors.New("the broker has given no answer")
	default:
		if value, ok := strings.CutPrefix(string(answer[4:]), "ok "); ok {
			return value, nil
		}
		err = errors.New(string(answer[4:]))
	}
	return "", fmt.Errorf("evaluate %s in RabbitMQ: %w", expressions, errors.Join(context.Cause(ctx), err))
}
