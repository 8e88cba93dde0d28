//go:build fleet

package kvloop

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "kvloop/clients/go/kvloopv1alpha1"
)

// routers returns the routers of the fleet that whoever runs the tests has started.
func routers(t *testing.T) []string {
	t.Helper()
	listed := os.Getenv("KVLOOP_ROUTERS")
	if listed == "" {
		t.Fatal("KVLOOP_ROUTERS is not set; tests/client/test_client_go.py starts a fleet and sets it")
	}
	return strings.Split(listed, ",")
}

func say(t *testing.T, session *Session, history []uint32, ttl time.Duration) ([]uint32, *pb.Summary) {
	t.Helper()
	turn := Turn{
		Prompt: history,
		Sampling: &pb.SamplingParams{
			Temperature: proto.Float64(0), MaxTokens: proto.Int32(32), IgnoreEos: proto.Bool(true),
		},
		Retention: &pb.Retention{Ttl: durationpb.New(ttl)},
	}
	answer, err := session.Complete(within(t), turn)
	if err != nil {
		t.Fatal(err)
	}
	return append(history, answer.TokenIDs...), answer.Summary
}

func TestAConversationOnAFleet(t *testing.T) {
	client := dial(t, routers(t))
	conversation := Conversation{ID: "go-test"}
	session, err := client.OpenSession(context.Background(), conversation)
	if err != nil {
		t.Fatal(err)
	}
	history := make([]uint32, 200)
	for i := range history {
		history[i] = uint32(100 + i)
	}
	const ttl = 2 * time.Second
	history, first := say(t, session, history, ttl)
	if first.GetReuse().GetVerdict() != pb.Verdict_VERDICT_RECOMPUTE {
		t.Errorf("first turn: %v", first.GetReuse())
	}
	// Its time is over, but the session is open.
	begun := time.Now()
	until(t, "more than its own time", func() bool {
		lease, err := client.Get(within(t), conversation)
		if err != nil || lease == nil {
			t.Fatalf("not held after %v: %v", time.Since(begun), err)
		}
		return time.Since(begun) > 2*ttl
	})
	history = append(history, 7, 8, 9)
	_, second := say(t, session, history, ttl)
	if tokens := second.GetReuse().GetTokens(); tokens.GetReadback()+tokens.GetDLocal() == 0 {
		t.Errorf("second turn: %v", second.GetReuse())
	}
	if released, err := session.Close(within(t)); err != nil || !released {
		t.Errorf("closed: %v %v", released, err)
	}
	if lease, err := client.Get(within(t), conversation); err != nil || lease != nil {
		t.Errorf("still held: %v %v", lease, err)
	}
}

func TestARefusalOfARealRouter(t *testing.T) {
	client := dial(t, routers(t))
	_, _, err := played(t, client, Turn{Prompt: nil})
	e, ok := err.(*Error)
	if !ok || e.Reason != "EMPTY_PROMPT" || e.Field != "prompt_token_ids" {
		t.Errorf("%v", err)
	}
}
