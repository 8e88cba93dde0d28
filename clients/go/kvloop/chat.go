package kvloop

import (
	"context"
	"errors"
	"io"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "kvloop/clients/go/kvloopv1alpha1"
)

// Chats is a client of one fleet's gateways. It is safe for concurrent use.
type Chats struct {
	connection *grpc.ClientConn
	chats      pb.ChatServiceClient
}

// DialChats returns a client of the gateways at some host:port, as Dial does of routers.
func DialChats(targets []string, opts ...Option) (*Chats, error) {
	connection, err := connect(targets, opts)
	if err != nil {
		return nil, err
	}
	return &Chats{connection, pb.NewChatServiceClient(connection)}, nil
}

// Close closes the connections; what is under way is cancelled.
func (c *Chats) Close() error { return c.connection.Close() }

// Service returns the stub, for calls that this package has no words for: sessions among them.
func (c *Chats) Service() pb.ChatServiceClient { return c.chats }

// ChatStream is an answer under way. One goroutine reads.
type ChatStream struct {
	answer pb.ChatService_ChatClient
	cancel context.CancelFunc
	ended  bool
}

// ChatAnswer is a whole answer.
type ChatAnswer struct {
	// Message is the answer as the next turn's history takes it.
	Message *pb.ChatMessage
	Summary *pb.ChatSummary
}

// Chat serves one turn. Without a deadline in ctx it takes ten minutes at most. Failures come from Recv.
func (c *Chats) Chat(ctx context.Context, request *pb.ChatRequest) (*ChatStream, error) {
	ctx, cancel := withDefaultTimeout(ctx, turnTimeout)
	answer, err := c.chats.Chat(ctx, request)
	if err != nil {
		cancel()
		return nil, failed(err)
	}
	return &ChatStream{answer: answer, cancel: cancel}, nil
}

// Recv returns what is new of the answer, or its summary, and io.EOF after that. Once something has come, a failure is
// final.
func (s *ChatStream) Recv() (*pb.ChatResponse, error) {
	response, err := s.answer.Recv()
	if err == nil {
		s.ended = s.ended || response.GetSummary() != nil
		return response, nil
	}
	s.cancel()
	if errors.Is(err, io.EOF) {
		if s.ended {
			return nil, io.EOF
		}
		err = status.Error(codes.Unavailable, "the stream ended without a summary")
	}
	return nil, failed(err)
}

// Close cancels what is left of the turn. Not needed after an error of Recv's, io.EOF included.
func (s *ChatStream) Close() { s.cancel() }

// Collect reads the rest of the answer; with an error, what came before it.
func (s *ChatStream) Collect() (ChatAnswer, error) {
	answer := ChatAnswer{Message: &pb.ChatMessage{Role: pb.ChatRole_CHAT_ROLE_ASSISTANT}}
	var content, reasoning strings.Builder
	var err error
	for {
		var response *pb.ChatResponse
		if response, err = s.Recv(); err != nil {
			break
		}
		if summary := response.GetSummary(); summary != nil {
			answer.Summary = summary
			continue
		}
		delta := response.GetDelta()
		content.WriteString(delta.GetContent())
		reasoning.WriteString(delta.GetReasoning())
		for _, piece := range delta.GetToolCalls() {
			for len(answer.Message.ToolCalls) <= int(piece.GetIndex()) {
				answer.Message.ToolCalls = append(answer.Message.ToolCalls, &pb.ToolCall{})
			}
			call := answer.Message.ToolCalls[piece.GetIndex()]
			if piece.GetId() != "" {
				call.Id = piece.GetId()
			}
			if piece.GetName() != "" {
				call.Name = piece.GetName()
			}
			call.ArgumentsJson += piece.GetArgumentsDelta()
		}
	}
	answer.Message.Content, answer.Message.Reasoning = content.String(), reasoning.String()
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return answer, err
}

// Complete serves one turn and waits for its end.
func (c *Chats) Complete(ctx context.Context, request *pb.ChatRequest) (ChatAnswer, error) {
	stream, err := c.Chat(ctx, request)
	if err != nil {
		return ChatAnswer{}, err
	}
	return stream.Collect()
}
