#if canImport(Observation)
    import Observation
    import Testing

    @testable import MLXInferClient

    struct ConversationTests {
        private static let begun: [FaultServer.Step] = [
            .read, .send(Transcript.stream(Array(Transcript.chatEvents.prefix(3)), end: false)), .hold,
        ]

        @Test @MainActor func aTurn() async throws {
            let server = try FaultServer([.read, .send(Transcript.chat)])
            let conversation = Conversation(server.client, request: ChatRequest([.system("Be brief.")]))
            conversation.send("Hi")
            #expect(conversation.isAnswering && conversation.messages == [.system("Be brief."), .user("Hi")])
            await conversation.settled()
            #expect(conversation.messages == [.system("Be brief."), .user("Hi"), .assistant("Grüße 🙂")])
            #expect(!conversation.isAnswering && conversation.failure == nil && conversation.usage?.completionTokens == 2)
        }

        @Test @MainActor func aConnectionThatIsLostAndFound() async throws {
            let cut = Transcript.stream(Array(Transcript.chatEvents.prefix(3)), end: false)
            let server = try FaultServer([.read, .send(cut)], [.read, .send(Transcript.chat)], [.read, .send(Transcript.chat)])
            let conversation = Conversation(server.client)
            conversation.send("Hi")
            await conversation.settled()
            guard case .streamInterrupted("Grü", _) = conversation.failure else {
                Issue.record("\(String(describing: conversation.failure))")
                return
            }
            #expect(conversation.messages == [.user("Hi"), .assistant("Grü")])
            conversation.retry()
            await conversation.settled()
            #expect(conversation.messages == [.user("Hi"), .assistant("Grüße 🙂")] && conversation.failure == nil)
            conversation.send("And now?")
            await conversation.settled()
            #expect(conversation.messages.count == 4 && conversation.failure == nil)
        }

        @Test @MainActor func toolsAreRun() async throws {
            let server = try FaultServer([.read, Transcript.calls(("clock", "{}"))], [.read, .send(Transcript.chat)])
            let conversation = Conversation(server.client)
            conversation.tools = [CallableTool("clock", "The time") { (_: [String: String]) in "noon" }]
            conversation.send("Hi")
            await conversation.settled()
            #expect(conversation.messages.map(\.role) == [.user, .assistant, .tool, .assistant] && conversation.failure == nil)
            #expect(conversation.messages.map(\.content) == ["Hi", "", "noon", "Grüße 🙂"])
            #expect(conversation.messages[1].toolCalls.map(\.name) == ["clock"])
        }

        @Test @MainActor func stoppingDuringAToolLeavesNoCallWithoutItsResult() async throws {
            let server = try FaultServer([.read, Transcript.calls(("wait", "{}"))])
            let begun = Locked(false)
            let conversation = Conversation(server.client)
            conversation.tools = [
                CallableTool("wait", "Waits") { (_: [String: String]) in
                    begun.withLock { $0 = true }
                    try await Task.sleep(for: .seconds(1000))
                    return ""
                }
            ]
            conversation.send("Hi")
            #expect(await eventually { begun.withLock { $0 } })
            conversation.stop()
            #expect(conversation.messages == [.user("Hi")] && conversation.failure == nil && !conversation.isAnswering)
        }

        @Test @MainActor func viewsAreTold() async throws {
            let server = try FaultServer([.read, .send(Transcript.chat)])
            let conversation = Conversation(server.client)
            conversation.send("Hi")
            var seen: [String] = []
            repeat {
                let (changes, changed) = AsyncStream.makeStream(of: Void.self)
                withObservationTracking {
                    seen.append(conversation.answer?.text ?? conversation.messages.last?.content ?? "")
                } onChange: {
                    changed.yield()
                }
                if seen.last != "Grüße 🙂" || conversation.isAnswering { for await _ in changes { break } }
            } while seen.last != "Grüße 🙂" || conversation.isAnswering
            #expect(seen.first == "" && conversation.messages.count == 2)
        }

        @Test @MainActor func stoppingKeepsWhatHadCome() async throws {
            let server = try FaultServer(Self.begun)
            let conversation = Conversation(server.client)
            conversation.send("Hi")
            #expect(await eventually { conversation.answer?.text == "Grü" })
            conversation.stop()
            #expect(!conversation.isAnswering && conversation.messages == [.user("Hi"), .assistant("Grü")])
            #expect(await eventually { server.departures.count == 1 })
            #expect(conversation.failure == nil)
        }

        @Test @MainActor func aFailureAndAnotherAttempt() async throws {
            let busy = Transcript.json(#"{"error":{"message":"busy"}}"#, status: "503 Service Unavailable")
            let server = try FaultServer([.read, .send(busy)], [.read, .send(Transcript.chat)])
            let conversation = Conversation(server.client)
            conversation.send("Hi")
            await conversation.settled()
            #expect(conversation.failure == .api(APIError(status: 503, message: "busy")) && conversation.messages == [.user("Hi")])
            conversation.retry()
            #expect(conversation.failure == nil)
            await conversation.settled()
            #expect(conversation.messages == [.user("Hi"), .assistant("Grüße 🙂")])
            conversation.retry()
            #expect(conversation.messages == [.user("Hi")])
            await conversation.settled()
            #expect(conversation.messages.count == 2 && server.requests.count == 3)
        }

        @Test @MainActor func editingAndAskingWhileAnAnswerIsWritten() async throws {
            let server = try FaultServer(Self.begun, [.read, .send(Transcript.chat)])
            let conversation = Conversation(server.client)
            conversation.send("one")
            #expect(await eventually { conversation.answer?.text == "Grü" })
            conversation.send("two")
            await conversation.settled()
            #expect(conversation.messages.map(\.content) == ["one", "Grü", "two", "Grüße 🙂"])
            conversation.edit(0, "three")
            await conversation.settled()
            #expect(conversation.messages.map(\.content) == ["three", "Grüße 🙂"])
            Conversation(server.client).retry()
            conversation.edit(9, "nowhere")
            #expect(conversation.messages.count == 2 && !conversation.isAnswering)
        }

        @Test @MainActor func aConversationThatNobodyHoldsIsOver() async throws {
            let server = try FaultServer(Self.begun)
            var conversation: Conversation? = Conversation(server.client)
            conversation?.send("Hi")
            #expect(await eventually { conversation?.answer?.text == "Grü" })
            conversation = nil
            #expect(await eventually { server.departures.count == 1 })
        }
    }
#endif
