package kvloop

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "kvloop/clients/go/kvloopv1alpha1"
)

// scripted is a router that answers by script: each call takes the next failure; without one it is answered.
type scripted struct {
	pb.UnimplementedRouterServiceServer

	target string
	server *grpc.Server

	mu       sync.Mutex
	failures []error
	requests []*pb.GenerateRequest
	tokens   []string
	sessions []*pb.SessionOpen
	ended    int
	closed   int
	// After so many chunks an answer fails or ends; 0 is the whole answer.
	cut     int
	cutWith error

	breaking  chan struct{}
	cancelled chan struct{}
	stuck     bool
	// A session's close is not answered.
	deaf bool
}

func serve(t *testing.T, opts ...grpc.ServerOption) *scripted {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &scripted{
		target:    listener.Addr().String(),
		server:    grpc.NewServer(opts...),
		breaking:  make(chan struct{}),
		cancelled: make(chan struct{}, 1),
	}
	pb.RegisterRouterServiceServer(s.server, s)
	go s.server.Serve(listener)
	t.Cleanup(s.server.Stop)
	return s
}

func (s *scripted) next() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.failures) == 0 {
		return nil
	}
	err := s.failures[0]
	s.failures = s.failures[1:]
	return err
}

func (s *scripted) fail(errs ...error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failures = append(s.failures, errs...)
}

func (s *scripted) count(what func() int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return what()
}

func (s *scripted) Generate(request *pb.GenerateRequest, stream pb.RouterService_GenerateServer) error {
	s.mu.Lock()
	s.requests = append(s.requests, request)
	headers, _ := metadata.FromIncomingContext(stream.Context())
	s.tokens = append(s.tokens, headers.Get("authorization")...)
	s.mu.Unlock()
	if err := s.next(); err != nil {
		return err
	}
	for i, id := range []uint32{1, 2, 3} {
		if s.cut > 0 && i == s.cut {
			return s.cutWith
		}
		chunk := &pb.Chunk{TokenIds: Pack([]uint32{id}), Text: string(rune('a' + i))}
		if err := stream.Send(&pb.GenerateResponse{Event: &pb.GenerateResponse_Chunk{Chunk: chunk}}); err != nil {
			return err
		}
		if s.stuck {
			<-stream.Context().Done()
			s.cancelled <- struct{}{}
			return stream.Context().Err()
		}
	}
	summary := &pb.Summary{OutputTokens: 3, RequestId: request.GetRequestId()}
	return stream.Send(&pb.GenerateResponse{Event: &pb.GenerateResponse_Summary{Summary: summary}})
}

func (s *scripted) Session(stream pb.RouterService_SessionServer) error {
	request, err := stream.Recv()
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.sessions = append(s.sessions, request.GetOpen())
	s.mu.Unlock()
	if err := s.next(); err != nil {
		return err
	}
	opened := &pb.SessionOpened{AliveTime: durationpb.New(30 * time.Second)}
	if err := stream.Send(&pb.SessionResponse{Event: &pb.SessionResponse_Opened{Opened: opened}}); err != nil {
		return err
	}
	closing := make(chan error, 1)
	go func() {
		_, err := stream.Recv()
		closing <- err
	}()
	select {
	case err := <-closing:
		if err != nil {
			return err
		}
	case <-s.breaking:
		return refusal(codes.Unavailable, ReasonDraining)
	}
	if s.deaf {
		<-stream.Context().Done()
		return stream.Context().Err()
	}
	s.mu.Lock()
	s.closed++
	s.mu.Unlock()
	closed := &pb.SessionClosed{Released: true}
	return stream.Send(&pb.SessionResponse{Event: &pb.SessionResponse_Closed{Closed: closed}})
}

func (s *scripted) EndConversation(context.Context, *pb.EndConversationRequest) (*pb.EndConversationResponse, error) {
	s.mu.Lock()
	s.ended++
	s.mu.Unlock()
	return &pb.EndConversationResponse{Released: true}, s.next()
}

func (s *scripted) GetConversation(context.Context, *pb.GetConversationRequest) (*pb.GetConversationResponse, error) {
	return nil, refusal(codes.NotFound, ReasonConversationNotFound)
}

// refusal returns a status as kvloop's routers make them.
func refusal(code codes.Code, reason string) error {
	s, err := status.New(code, "as told").WithDetails(
		&errdetails.ErrorInfo{Reason: reason, Domain: Domain, Metadata: map[string]string{"limit": "8"}},
		&errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: "prompt_token_ids"}}},
		&errdetails.RetryInfo{RetryDelay: durationpb.New(1500 * time.Millisecond)},
	)
	if err != nil {
		panic(err)
	}
	return s.Err()
}

func dial(t *testing.T, targets []string, opts ...Option) *Client {
	t.Helper()
	client, err := Dial(targets, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// until waits for something that another goroutine brings about.
func until(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for limit := time.Now().Add(20 * time.Second); !condition(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatalf("never came: %s", what)
		}
	}
}
