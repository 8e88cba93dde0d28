package kvloop

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
)

func (s *scripted) opened() int { return s.count(func() int { return len(s.sessions) }) }

func open(t *testing.T, client *Client) *Session {
	t.Helper()
	session, err := client.OpenSession(context.Background(), Conversation{ID: "c", Model: "m"})
	if err != nil {
		t.Fatal(err)
	}
	return session
}

func TestASessionIsOpenedServedAndClosed(t *testing.T) {
	router := serve(t)
	session := open(t, dial(t, []string{router.target}))
	if _, err := session.Complete(within(t), Turn{Prompt: prompt}); err != nil {
		t.Fatal(err)
	}
	if request := router.requests[0]; request.GetConversationId() != "c" || request.GetModel() != "m" {
		t.Errorf("%v", request)
	}
	for i := 0; i < 2; i++ {
		if released, err := session.Close(within(t)); err != nil || !released {
			t.Error(released, err)
		}
	}
	if router.closed != 1 || router.ended != 0 || router.opened() != 1 {
		t.Error(router.closed, router.ended, router.opened())
	}
}

func TestASessionThatBrokeIsOpenedAgain(t *testing.T) {
	router := serve(t)
	session := open(t, dial(t, []string{router.target}))
	router.fail(refusal(codes.Unavailable, ReasonDraining))
	router.breaking <- struct{}{}
	until(t, "a third stream", func() bool { return router.opened() == 3 })
	if released, err := session.Close(within(t)); err != nil || !released {
		t.Error(released, err)
	}
}

func TestASessionThatIsBrokenWhenClosedIsEndedByACall(t *testing.T) {
	router := serve(t)
	session := open(t, dial(t, []string{router.target}))
	router.fail(refusal(codes.Unauthenticated, ReasonUnauthenticated))
	router.breaking <- struct{}{}
	until(t, "a refused stream", func() bool { return router.opened() == 2 })
	if released, err := session.Close(within(t)); err != nil || !released {
		t.Error(released, err)
	}
	if router.closed != 0 || router.ended != 1 {
		t.Error(router.closed, router.ended)
	}
}

func TestASessionWhoseCloseTakesAllTheTimeIsEndedByACall(t *testing.T) {
	router := serve(t)
	router.deaf = true
	session := open(t, dial(t, []string{router.target}))
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if released, err := session.Close(ctx); err != nil || !released {
		t.Error(released, err)
	}
	if router.closed != 0 || router.ended != 1 {
		t.Error(router.closed, router.ended)
	}
}

func TestAnAbandonedSessionLetsGoOfNothing(t *testing.T) {
	router := serve(t)
	client := dial(t, []string{router.target})
	open(t, client).Abandon()
	ctx, cancel := context.WithCancel(context.Background())
	session, err := client.OpenSession(ctx, Conversation{ID: "c"})
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	<-session.done
	if router.closed != 0 || router.ended != 0 {
		t.Error(router.closed, router.ended)
	}
}

func TestASessionThatCanNotBeOpenedSaysSo(t *testing.T) {
	for _, refused := range []error{
		refusal(codes.Unauthenticated, ReasonUnauthenticated),
		refusal(codes.ResourceExhausted, ReasonOverloaded),
	} {
		router := serve(t)
		for i := 0; i < 100; i++ {
			router.fail(refused)
		}
		session, err := dial(t, []string{router.target}).OpenSession(within(t), Conversation{ID: "c"})
		var e *Error
		if !errors.As(err, &e) || session != nil || e.Message != "as told" {
			t.Errorf("%v %v", session, err)
		}
	}
}
