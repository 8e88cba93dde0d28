package kvloop

import (
	"context"
	"errors"
	"io"
	"math/rand"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "kvloop/clients/go/kvloopv1alpha1"
)

const (
	openTimeout   = 10 * time.Second
	firstPause    = 100 * time.Millisecond
	longestPause  = 2 * time.Second
	openingTrials = 4
)

// Session is a conversation with an agent there: meanwhile what is held for it is held on, past its own time.
//
// A stream that breaks is opened again, at another router when there is one; turns don't depend on it.
type Session struct {
	client       *Client
	conversation Conversation
	cancel       context.CancelFunc
	closing      chan struct{}
	closeOnce    sync.Once
	done         chan struct{}

	// Written before done is closed.
	released *bool
}

// OpenSession opens a session. When ctx ends, the session is left as by a crash: what is held stays for its time.
func (c *Client) OpenSession(ctx context.Context, conversation Conversation) (*Session, error) {
	ctx, cancel := context.WithCancel(ctx)
	s := &Session{
		client:       c,
		conversation: conversation,
		cancel:       cancel,
		closing:      make(chan struct{}),
		done:         make(chan struct{}),
	}
	opened := make(chan error, 1)
	go s.hold(ctx, opened)
	if err := <-opened; err != nil {
		cancel()
		<-s.done
		return nil, err
	}
	return s, nil
}

// Generate serves one turn of the session's conversation.
func (s *Session) Generate(ctx context.Context, turn Turn) (*Stream, error) {
	turn.Conversation = s.conversation
	return s.client.Generate(ctx, turn)
}

// Complete serves one turn of the session's conversation and waits for its end.
func (s *Session) Complete(ctx context.Context, turn Turn) (Answer, error) {
	turn.Conversation = s.conversation
	return s.client.Complete(ctx, turn)
}

// Close lets go of what is held and ends the session; false when nothing was held.
func (s *Session) Close(ctx context.Context) (bool, error) {
	s.closeOnce.Do(func() { close(s.closing) })
	ctx, cancel := withDefaultTimeout(ctx, callTimeout)
	defer cancel()
	select {
	case <-s.done:
	case <-ctx.Done():
	}
	s.cancel()
	<-s.done
	if s.released != nil {
		return *s.released, nil
	}
	// The stream was broken just then, or took all the time there was; any router can let go.
	ctx, cancelEnd := context.WithTimeout(detached{ctx}, callTimeout)
	defer cancelEnd()
	return s.client.End(ctx, s.conversation)
}

// Abandon ends the session and lets go of nothing: what is held stays for its time.
func (s *Session) Abandon() {
	s.cancel()
	<-s.done
}

// hold keeps a stream open until the session is closed or cancelled; opened is told how the first opening went.
func (s *Session) hold(ctx context.Context, opened chan<- error) {
	defer close(s.done)
	told := false
	for trials := 1; ; trials++ {
		err := s.stream(ctx, func() {
			trials = 0
			if !told {
				told = true
				opened <- nil
			}
		})
		if err == nil {
			return
		}
		if !told && (final(err) || trials >= openingTrials || ctx.Err() != nil) {
			opened <- err
			return
		}
		if final(err) {
			return
		}
		pause := firstPause << trials
		if trials > 4 || pause > longestPause {
			pause = longestPause
		}
		select {
		case <-time.After(time.Duration(rand.Int63n(int64(pause)))):
		case <-s.closing:
			return
		case <-ctx.Done():
			return
		}
	}
}

// stream opens one stream and returns nil once it was closed cleanly.
func (s *Session) stream(ctx context.Context, opened func()) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	late := time.AfterFunc(openTimeout, cancel)
	stream, err := s.client.router.Session(ctx)
	if err != nil {
		return failed(err)
	}
	// When this fails, Recv says why.
	_ = stream.Send(&pb.SessionRequest{Request: &pb.SessionRequest_Open{Open: &pb.SessionOpen{
		ConversationId: s.conversation.ID,
		Model:          s.conversation.Model,
		Adapter:        s.conversation.Adapter,
		CacheSalt:      s.conversation.CacheSalt,
	}}})
	response, err := stream.Recv()
	if !late.Stop() {
		return failed(status.Error(codes.DeadlineExceeded, "the session was not opened in time"))
	}
	if err == nil && response.GetOpened() == nil {
		err = io.EOF
	}
	if err != nil {
		return ended(err)
	}
	opened()

	received := make(chan error, 1)
	go func() {
		response, err := stream.Recv()
		if closed := response.GetClosed(); err == nil && closed != nil {
			released := closed.GetReleased()
			s.released = &released
		} else if err == nil {
			err = io.EOF
		}
		received <- err
	}()
	select {
	case err = <-received:
	case <-s.closing:
		_ = stream.Send(&pb.SessionRequest{Request: &pb.SessionRequest_Close{Close: &pb.SessionClose{}}})
		err = <-received
	}
	if err == nil {
		return nil
	}
	return ended(err)
}

// detached has the values of a context, but neither its end nor its deadline.
type detached struct{ context.Context }

func (detached) Deadline() (time.Time, bool) { return time.Time{}, false }
func (detached) Done() <-chan struct{}       { return nil }
func (detached) Err() error                  { return nil }

func ended(err error) error {
	if errors.Is(err, io.EOF) {
		err = status.Error(codes.Unavailable, "the session's stream ended")
	}
	return failed(err)
}
