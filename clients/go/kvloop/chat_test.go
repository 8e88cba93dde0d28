package kvloop

import (
	"context"
	"errors"
	"net"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "kvloop/clients/go/kvloopv1alpha1"
)

// gateway answers each chat by the next script, and then with the last one again.
type gateway struct {
	pb.UnimplementedChatServiceServer
	scripts  [][]*pb.ChatResponse
	failure  error
	requests []*pb.ChatRequest
}

func (g *gateway) Chat(request *pb.ChatRequest, stream pb.ChatService_ChatServer) error {
	g.requests = append(g.requests, request)
	script := g.scripts[0]
	if len(g.scripts) > 1 {
		g.scripts = g.scripts[1:]
	}
	for _, response := range script {
		if err := stream.Send(response); err != nil {
			return err
		}
	}
	return g.failure
}

func dialGateway(t *testing.T, g *gateway) *Chats {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	pb.RegisterChatServiceServer(server, g)
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	chats, err := DialChats([]string{listener.Addr().String()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { chats.Close() })
	return chats
}

func delta(d *pb.ChatDelta) *pb.ChatResponse {
	return &pb.ChatResponse{Event: &pb.ChatResponse_Delta{Delta: d}}
}

func end() *pb.ChatResponse {
	return &pb.ChatResponse{Event: &pb.ChatResponse_Summary{Summary: &pb.ChatSummary{Identity: "conversation_id"}}}
}

func TestChatAnswersAreGatheredForTheNextHistory(t *testing.T) {
	g := &gateway{scripts: [][]*pb.ChatResponse{{
		delta(&pb.ChatDelta{Content: "Let me ", Reasoning: "They want "}),
		delta(&pb.ChatDelta{Content: "look.", Reasoning: "it."}),
		delta(&pb.ChatDelta{ToolCalls: []*pb.ToolCallDelta{{Index: 0, Id: "a", Name: "weather", ArgumentsDelta: "{"}}}),
		delta(&pb.ChatDelta{ToolCalls: []*pb.ToolCallDelta{{Index: 1, Id: "b", Name: "time", ArgumentsDelta: "{}"}}}),
		delta(&pb.ChatDelta{ToolCalls: []*pb.ToolCallDelta{{Index: 0, ArgumentsDelta: "}"}}}),
		end(),
	}}}
	chats := dialGateway(t, g)
	asked := &pb.ChatMessage{Role: pb.ChatRole_CHAT_ROLE_USER, Content: "Weather?"}
	request := &pb.ChatRequest{ConversationId: "agent-1", Messages: []*pb.ChatMessage{asked}}
	answer, err := chats.Complete(context.Background(), request)
	if err != nil {
		t.Fatal(err)
	}
	want := &pb.ChatMessage{
		Role: pb.ChatRole_CHAT_ROLE_ASSISTANT, Content: "Let me look.", Reasoning: "They want it.",
		ToolCalls: []*pb.ToolCall{
			{Id: "a", Name: "weather", ArgumentsJson: "{}"}, {Id: "b", Name: "time", ArgumentsJson: "{}"},
		},
	}
	if !proto.Equal(answer.Message, want) {
		t.Errorf("got %v, want %v", answer.Message, want)
	}
	if answer.Summary.GetIdentity() != "conversation_id" {
		t.Errorf("got summary %v", answer.Summary)
	}
	if !proto.Equal(g.requests[0], request) {
		t.Errorf("asked for %v, want %v", g.requests[0], request)
	}
}

func TestAChatThatFailsKeepsWhatCame(t *testing.T) {
	for name, failure := range map[string]error{
		"ended without a summary": nil,
		"failed":                  status.Error(codes.Unavailable, "gone"),
	} {
		g := &gateway{scripts: [][]*pb.ChatResponse{{delta(&pb.ChatDelta{Content: "Let"})}}, failure: failure}
		answer, err := dialGateway(t, g).Complete(context.Background(), &pb.ChatRequest{})
		var e *Error
		if !errors.As(err, &e) {
			t.Errorf("%s: got error %v", name, err)
		}
		if answer.Message.GetContent() != "Let" || len(g.requests) != 1 {
			t.Errorf("%s: got %v after %d tries", name, answer.Message, len(g.requests))
		}
	}
}
