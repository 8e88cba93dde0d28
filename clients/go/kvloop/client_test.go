package kvloop

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"math/big"
	"net"
	"reflect"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
)

var prompt = []uint32{7, 8, 1 << 31}

func played(t *testing.T, client *Client, turn Turn) ([]uint32, string, error) {
	t.Helper()
	answer, err := client.Complete(within(t), turn)
	if err == nil && answer.Summary == nil {
		t.Fatal("no summary and no error")
	}
	return answer.TokenIDs, answer.Text, err
}

func TestATurnIsAskedForAsToldAndYieldsEvents(t *testing.T) {
	router := serve(t)
	client := dial(t, []string{router.target}, WithToken("secret"))
	conversation := Conversation{ID: "c", Model: "m", Adapter: "a", CacheSalt: "s"}
	ids, text, err := played(t, client, Turn{Prompt: prompt, Conversation: conversation, Recompute: true})
	if err != nil || text != "abc" || !reflect.DeepEqual(ids, []uint32{1, 2, 3}) {
		t.Fatalf("%v %q %v", ids, text, err)
	}
	request := router.requests[0]
	if !reflect.DeepEqual(Unpack(request.GetPromptTokenIds()), prompt) {
		t.Errorf("prompt %v", request.GetPromptTokenIds())
	}
	asked := Conversation{request.GetConversationId(), request.GetModel(), request.GetAdapter(), request.GetCacheSalt()}
	if asked != conversation || request.GetReusePolicy() == 0 || request.GetRequestId() == "" {
		t.Errorf("%v", request)
	}
	if router.tokens[0] != "Bearer secret" {
		t.Errorf("authorization %q", router.tokens[0])
	}
}

func TestWhatMayPassIsTriedAgainAsTheSameRequest(t *testing.T) {
	for _, passing := range []error{
		refusal(codes.Unavailable, ReasonWorkerFailed),
		refusal(codes.ResourceExhausted, ReasonOverloaded),
		status.Error(codes.Unavailable, ""),
	} {
		router := serve(t)
		client := dial(t, []string{router.target})
		router.fail(passing, passing)
		if _, _, err := played(t, client, Turn{Prompt: prompt}); err != nil {
			t.Fatalf("%v (grpc-go before 1.40 tries again only with GRPC_GO_RETRY=on)", err)
		}
		if len(router.requests) != 3 || router.requests[0].GetRequestId() != router.requests[2].GetRequestId() {
			t.Errorf("%d requests", len(router.requests))
		}
	}
}

func TestWhatWillNotPassIsToldAtOnce(t *testing.T) {
	router := serve(t)
	client := dial(t, []string{router.target})
	router.fail(refusal(codes.InvalidArgument, ReasonPromptTooLong))
	_, _, err := played(t, client, Turn{Prompt: prompt})
	var e *Error
	if !errors.As(err, &e) {
		t.Fatal(err)
	}
	if e.Code != codes.InvalidArgument || e.Reason != ReasonPromptTooLong || e.Field != "prompt_token_ids" ||
		e.RetryAfter != 1500*time.Millisecond || e.Metadata["limit"] != "8" || e.Message != "as told" {
		t.Errorf("%+v", e)
	}
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("status %v", status.Code(err))
	}
	if want := "kvloop: PROMPT_TOO_LONG (prompt_token_ids): as told"; err.Error() != want {
		t.Errorf("%q", err.Error())
	}
	if len(router.requests) != 1 {
		t.Errorf("%d requests", len(router.requests))
	}
}

func TestAfterTheFirstTokenNothingIsTriedAgain(t *testing.T) {
	router := serve(t)
	router.cut, router.cutWith = 2, refusal(codes.Unavailable, ReasonWorkerFailed)
	ids, _, err := played(t, dial(t, []string{router.target}), Turn{Prompt: prompt})
	var e *Error
	if !errors.As(err, &e) || e.Reason != ReasonWorkerFailed || len(ids) != 2 || len(router.requests) != 1 {
		t.Errorf("%v %v, %d requests", ids, err, len(router.requests))
	}
}

func TestAnAnswerWithoutSummaryIsIncomplete(t *testing.T) {
	router := serve(t)
	router.cut = 2
	if _, _, err := played(t, dial(t, []string{router.target}), Turn{Prompt: prompt}); status.Code(err) != codes.Unavailable {
		t.Errorf("%v", err)
	}
}

func TestAnotherRouterServesWhenOneIsGone(t *testing.T) {
	gone, router := serve(t), serve(t)
	client := dial(t, []string{gone.target, router.target})
	// Connects to both first.
	until(t, "turns at both", func() bool {
		if _, _, err := played(t, client, Turn{Prompt: prompt}); err != nil {
			t.Fatal(err)
		}
		return len(gone.requests) > 0 && len(router.requests) > 0
	})
	gone.server.Stop()
	for i := 0; i < 8; i++ {
		if _, _, err := played(t, client, Turn{Prompt: prompt}); err != nil {
			t.Fatal(err)
		}
	}
}

func TestClosingATurnEarlyCancelsIt(t *testing.T) {
	router := serve(t)
	router.stuck = true
	stream, err := dial(t, []string{router.target}).Generate(within(t), Turn{Prompt: prompt})
	if err != nil {
		t.Fatal(err)
	}
	if event, err := stream.Recv(); err != nil || event.Text != "a" {
		t.Fatal(event, err)
	}
	stream.Close()
	select {
	case <-router.cancelled:
	case <-within(t).Done():
		t.Fatal("not cancelled")
	}
}

func TestEndAndGet(t *testing.T) {
	router := serve(t)
	client := dial(t, []string{router.target})
	if released, err := client.End(within(t), Conversation{ID: "c"}); err != nil || !released {
		t.Error(released, err)
	}
	if lease, err := client.Get(within(t), Conversation{ID: "c"}); err != nil || lease != nil {
		t.Error(lease, err)
	}
}

func TestDialRefusesWhatIsNoTarget(t *testing.T) {
	for _, targets := range [][]string{nil, {"no port"}} {
		if _, err := Dial(targets); err == nil {
			t.Errorf("%v was taken", targets)
		}
	}
}

func TestTLSWithACertificateOfItsOwn(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(time.Hour),
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA:         true, BasicConstraintsValid: true,
	}
	raw, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParseCertificate(raw)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(parsed)
	pair := tls.Certificate{Certificate: [][]byte{raw}, PrivateKey: key}
	router := serve(t, grpc.Creds(credentials.NewServerTLSFromCert(&pair)))
	trusting := dial(t, []string{router.target}, WithTLS(&tls.Config{RootCAs: roots}), WithToken("secret"))
	if _, _, err := played(t, trusting, Turn{Prompt: prompt}); err != nil {
		t.Fatal(err)
	}
	stranger := dial(t, []string{router.target}, WithTLS(&tls.Config{}))
	if _, _, err := played(t, stranger, Turn{Prompt: prompt}); status.Code(err) != codes.Unavailable {
		t.Errorf("%v", err)
	}
}

func TestRecvGoesOnSayingThatItIsOver(t *testing.T) {
	router := serve(t)
	stream, err := dial(t, []string{router.target}).Generate(within(t), Turn{Prompt: prompt})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Collect(); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		t.Error(err)
	}
}
