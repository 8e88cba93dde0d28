// Command agent plays an agent with a tool: every turn resends the whole history, with the tool's result behind it,
// and says how much of it was reused. The session keeps the history's KV through calls of the tool, however long
// they take.
//
// Token ids come from a tokenizer of yours; here a byte is a token, which any model takes, if not to heart.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"strings"

	"google.golang.org/protobuf/proto"

	"kvloop/clients/go/kvloop"
	pb "kvloop/clients/go/kvloopv1alpha1"
)

func main() {
	routers := flag.String("routers", "127.0.0.1:7600", "host:port of the routers, separated by commas")
	token := flag.String("token", "", "the tenant's token")
	name := flag.String("conversation", "go-agent", "name of the conversation")
	turns := flag.Int("turns", 4, "turns to play")
	flag.Parse()
	if err := run(strings.Split(*routers, ","), *token, *name, *turns); err != nil {
		log.Fatal(err)
	}
}

func run(routers []string, token, name string, turns int) error {
	ctx := context.Background()
	client, err := kvloop.Dial(routers, kvloop.WithToken(token))
	if err != nil {
		return err
	}
	defer client.Close()
	session, err := client.OpenSession(ctx, kvloop.Conversation{ID: name})
	if err != nil {
		return err
	}
	history := ids("You look after a warehouse. Count what is in each crate, one crate a turn.\n")
	for turn := 1; turn <= turns; turn++ {
		history = append(history, ids(lookIntoCrate(turn))...)
		answer, err := session.Complete(ctx, kvloop.Turn{
			Prompt:   history,
			Sampling: &pb.SamplingParams{Temperature: proto.Float64(0), MaxTokens: proto.Int32(16)},
		})
		if err != nil {
			return err
		}
		history = append(history, answer.TokenIDs...)
		summary := answer.Summary
		tokens := summary.GetReuse().GetTokens()
		fmt.Printf("turn %d: %s, %d of %d prompt tokens reused, first token after %.0f ms\n",
			turn, strings.TrimPrefix(summary.GetReuse().GetVerdict().String(), "VERDICT_"),
			summary.GetPromptTokens()-tokens.GetComputed(), summary.GetPromptTokens(), summary.GetTtftMs())
	}
	released, err := session.Close(ctx)
	if err != nil {
		return err
	}
	fmt.Printf("closed, released: %t\n", released)
	return nil
}

// lookIntoCrate is the agent's tool.
func lookIntoCrate(number int) string {
	return fmt.Sprintf("Crate A%02d holds %d copper valves, %d brass fittings and a note that says: count again.\n",
		number, 7*number, 3*number+1)
}

func ids(text string) []uint32 {
	made := make([]uint32, len(text))
	for i := range made {
		made[i] = 3 + uint32(text[i])
	}
	return made
}
